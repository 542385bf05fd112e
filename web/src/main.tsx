import { render } from "preact";

render(<p>Penstock</p>, document.getElementById("app")!);
