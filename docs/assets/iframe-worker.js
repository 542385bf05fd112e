// Browsers start no worker for a page that is opened from a folder. This one runs the worker's script in a hidden frame instead,
// so that the search also works there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(address) {
      super();
      this.#frame.hidden = true;
      this.#ready = new Promise((resolve) => {
        this.#frame.addEventListener("load", () => {
          const inner = this.#frame.contentWindow;
          inner.postMessage = (data) => {
            const event = new MessageEvent("message", { data });
            this.dispatchEvent(event);
            this.onmessage?.(event);
          };
          inner.importScripts = (...scripts) => Promise.all(scripts.map((script) => load(inner, script)));
          load(inner, address).then(() => resolve(inner));
        }, { once: true });
      });
      document.documentElement.append(this.#frame);
    }

    postMessage(data) {
      this.#ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };

  function load(target, address) {
    return new Promise((resolve, reject) => {
      const script = target.document.createElement("script");
      script.src = new URL(address, document.baseURI).href;
      script.addEventListener("load", resolve);
      script.addEventListener("error", reject);
      target.document.head.append(script);
    });
  }
}
