import type { Target } from "../draw/target.ts";
import { useStudio } from "../state/studio.ts";

const SEVERITY: Record<string, string> = { hang: "hangs", wrong: "wrong", memory: "memory", untidy: "untidy" };

/** What the verifier found; each entry leads to its place on the grid. */
export function Findings({ go }: { go: (target: Target) => void }) {
  const studio = useStudio();
  const panels = studio.panels.value.map((shown, panel) => ({ shown, panel })).filter(({ shown }) => shown.view.findings.length > 0);
  if (!panels.length) return null;
  return (
    <>
      {panels.map(({ shown, panel }) => (
        <section key={panel} class="card findings" role="region" aria-label="Findings" data-testid="findings">
          <h2>
            {count(shown.view.numFindings)} in {shown.view.title}
          </h2>
          {!shown.timed && <p>The order cannot run, so that there are no times: the grid shows each rank's actions step by step.</p>}
          <ol>
            {shown.view.findings.slice(0, 100).map((finding, index) => (
              <li key={index}>
                <button class="finding" onClick={() => go({ what: "finding", panel, index })}>
                  <span class="rule">{finding.rule}</span>
                  <span class="severity">{SEVERITY[finding.severity] ?? finding.severity}</span>
                  <span class="where">
                    rank {finding.rank}, step {finding.step}
                    {finding.action && ` (${finding.action})`}
                  </span>
                  <span class="message">{finding.message}. {finding.remedy}.</span>
                </button>
              </li>
            ))}
          </ol>
          {shown.view.numFindings > Math.min(100, shown.view.findings.length) && <p class="quiet">and {shown.view.numFindings - Math.min(100, shown.view.findings.length)} more</p>}
        </section>
      ))}
    </>
  );
}

function count(findings: number): string {
  return findings === 1 ? "One finding" : `${findings} findings`;
}
