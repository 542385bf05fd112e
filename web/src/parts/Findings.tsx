import { repair, type Finding } from "../core/index.ts";
import type { Target } from "../draw/target.ts";
import { useStudio, type Studio } from "../state/studio.ts";

const SEVERITY: Record<string, string> = { hang: "hangs", wrong: "wrong", memory: "memory", untidy: "untidy" };
const FEW = 100;

/** What the verifier found; each entry leads to its place on the grid, and its remedy can be applied. */
export function Findings({ go }: { go: (target: Target) => void }) {
  const studio = useStudio();
  const panels = studio.panels.value
    .map((shown, panel) => ({ shown, panel, findings: shown.view.findings }))
    .filter(({ findings }) => findings.length > 0);
  if (!panels.length) return null;
  return (
    <>
      {panels.map(({ shown, panel, findings }) => {
        const more = shown.view.numFindings - Math.min(FEW, findings.length);
        return (
          <section key={panel} class="card findings" role="region" aria-label="Findings" data-testid="findings">
            <div class="card-head">
              <h2>
                {count(shown.view.numFindings)} in {shown.view.title}
              </h2>
              {panel === 0 && canRepair(studio, findings) && <button onClick={() => repairAll(studio)}>Repair all</button>}
            </div>
            {!shown.timed && <p>The order cannot run, so that there are no times: the grid shows each rank's actions step by step.</p>}
            <ol>
              {findings.slice(0, FEW).map((finding, index) => (
                <li key={index}>
                  <button class="finding" onClick={() => go({ what: "finding", panel, index })}>
                    <span class="rule">{finding.rule}</span>
                    <span class="severity">{SEVERITY[finding.severity] ?? finding.severity}</span>
                    <span class="where">
                      rank {finding.rank}, step {finding.step}
                      {finding.action && ` (${finding.action})`}
                    </span>
                    <Message finding={finding} />
                    <span class="message">{finding.remedy}.</span>
                  </button>
                  {panel === 0 && canApply(studio, finding) && <button class="apply" onClick={() => applyRemedy(studio, index)}>Apply</button>}
                </li>
              ))}
            </ol>
            {more > 0 && <p class="quiet">and {more} more</p>}
          </section>
        );
      })}
    </>
  );
}

/** The waits of a cycle one below the other, with the numbers of their arrows. */
function Message({ finding }: { finding: Finding }) {
  const at = finding.message.indexOf(": ");
  if ((finding.cycle?.length ?? 0) < 2 || at < 0) return <span class="message">{finding.message}.</span>;
  return (
    <>
      <span class="message">{finding.message.slice(0, at)}:</span>
      <span class="message waits">
        {finding.message.slice(at + 2).split("; ").map((wait, k) => <span key={k}><b>{k + 1}</b> {wait}</span>)}
      </span>
    </>
  );
}

function count(findings: number): string {
  return findings === 1 ? "One finding" : `${findings} findings`;
}

/** Whether one remedy may not be enough: of several findings, or of a hang, after which the order may hang elsewhere. */
function canRepair(studio: Studio, findings: Finding[]): boolean {
  return !studio.editing.refusal && (findings.length > 1 || findings.some((finding) => finding.severity === "hang"));
}

/** Whether the page can make the change that a remedy names; on a program it can take the order of computations first. */
function canApply(studio: Studio, finding: Finding): boolean {
  if (studio.editing.refusal) return false;
  if (studio.editing.active.value) return Boolean(finding.fix?.length);
  return ["placed", "complete", "order", "deadlock"].includes(finding.rule);
}

/** Makes the change that a finding's remedy names. */
function applyRemedy(studio: Studio, index: number): void {
  const { editing } = studio;
  const wanted = studio.panels.value[0].view.findings[index];
  editing.mode.value = true;
  const finding = editing.findings.value.find((own) => own.message === wanted.message) ?? (wanted.fix ? wanted : editing.findings.value[0]);
  editing.proofOpen.value = true;
  if (finding?.fix?.length) studio.change(...finding.fix);
  else if (!editing.findings.value.length) studio.say("The computations are in order: the schedule is lowered anew, with its communication in order.");
  else studio.say("This cannot be put right by moving actions.", "error");
}

/** Makes the changes after which nothing is left to find. */
function repairAll(studio: Studio): void {
  const { editing } = studio;
  editing.mode.value = true;
  const [base, order] = [editing.unchanged, editing.order.value];
  const edits = base && order ? repair(base, order) : null;
  editing.proofOpen.value = true;
  if (edits?.length) studio.change(...edits);
  else if (edits === null) studio.say("This cannot be put right by moving actions.", "error");
}
