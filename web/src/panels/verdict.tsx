/** The verdict: what is wrong, what it costs, the evidence and the advice; then all other findings. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Finding, FindingsDocument } from "../api/documents";
import type { OpenRun } from "../run/open-run";
import { percent } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import { Aftermath } from "./aftermath";
import { FindingBody, FindingFacts, findingKey } from "./finding";
import "./verdict.css";

export function VerdictPanel({ run }: { run: OpenRun }) {
  const found = run.findings.value;
  const [first, ...others] = found?.findings ?? [];
  // A hub that shut down before its last check never marks its findings as final.
  const live = (found?.live ?? false) && run.status.value?.over !== true;
  return (
    <section class={`card verdict ${first === undefined ? "" : first.text.look}`} aria-label="Verdict">
      <Announced found={found} />
      {found === null ? <p class="muted">Loading the run …</p> : first === undefined ? <NothingYet run={run} found={found} live={live} /> : <Lead run={run} finding={first} found={found} live={live} />}
      <Aftermath run={run} />
      {others.length > 0 && <Others run={run} findings={others} />}
    </section>
  );
}

function Lead({ run, finding, found, live }: { run: OpenRun; finding: Finding; found: FindingsDocument; live: boolean }) {
  return (
    <>
      <div class="verdict-head">
        <SeverityMark look={finding.text.look} large />
        <div>
          {live && finding.kind.startsWith("hang_") && <p class="hang-word">The job is hung</p>}
          <h2>{finding.title}</h2>
          <FindingFacts finding={finding} />
        </div>
      </div>
      <FindingBody run={run} finding={finding} />
      <Judged found={found} live={live} />
    </>
  );
}

function Judged({ found, live }: { found: FindingsDocument; live: boolean }) {
  if (!found.live || found.judged === undefined) return null;
  return (
    <p class="muted small">
      {found.judged.text} {live ? "" : ELSEWHERE}
    </p>
  );
}

function NothingYet({ run, found, live }: { run: OpenRun; found: FindingsDocument; live: boolean }) {
  const lost = run.connection.value === "lost" || run.connection.value === "gone";
  const [head, more] = nothingText(found, { live, lost, steps: (run.status.value?.newest_step ?? -1) + 1 });
  return (
    <div class="verdict-head">
      <span class="severity info large" aria-hidden="true">
        {live ? "…" : "●"}
      </span>
      <div>
        <h2>{head}</h2>
        <p class="muted">{more}</p>
      </div>
    </div>
  );
}

const ELSEWHERE = "The verdict on the whole run is in summary.txt and report.html in its folder.";

/** The hub's headline and sentence, unless the connection to it is the problem: it ended before its last check, or is silent. */
export function nothingText(found: FindingsDocument, { live, lost, steps }: { live: boolean; lost: boolean; steps: number }): [string, string] {
  if (found.live && !live && steps > 0) return ["The run has ended; the final verdict did not reach this page.", ELSEWHERE];
  if (live && lost && steps > 0) return ["The state of the run is unknown.", `There were no findings at the last update. ${ELSEWHERE.replace(" is in ", " will be in ")}`];
  return found.nothing ?? ["Nothing was found.", ""];
}

function Others({ run, findings }: { run: OpenRun; findings: readonly Finding[] }) {
  return (
    <div class="others">
      <h3>Also found</h3>
      {findings.map((finding) => (
        <OtherFinding key={findingKey(finding)} run={run} finding={finding} />
      ))}
    </div>
  );
}

function OtherFinding({ run, finding }: { run: OpenRun; finding: Finding }) {
  // Collapsed findings are not rendered: a run may have dozens, each with charts.
  const [open, setOpen] = useState(false);
  return (
    <details class={`other ${finding.severity}`} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <SeverityMark look={finding.text.look} />
        <span class="other-title">{finding.title}</span>
        {finding.cost?.share ? <span class="other-share">{percent(finding.cost.share)}</span> : null}
      </summary>
      {open && (
        <>
          <FindingFacts finding={finding} />
          <FindingBody run={run} finding={finding} />
        </>
      )}
    </details>
  );
}

/** How long the text stays in the live region; later, the heading has it. */
const SAID_MS = 8000;

/** Announce a new verdict to screen readers, but not changed figures or the first one after opening. */
function Announced({ found }: { found: FindingsDocument | null }) {
  const finding = found?.findings[0];
  const key = found === null ? null : finding === undefined ? "" : findingKey(finding);
  const before = useRef<string | null>(null);
  const [announced, setAnnounced] = useState("");
  useEffect(() => {
    const known = before.current;
    before.current = key;
    if (key === null || known === null || known === key) return;
    setAnnounced(finding === undefined ? "The verdict was withdrawn." : `New verdict: ${finding.title}`);
    const timer = setTimeout(() => setAnnounced(""), SAID_MS);
    return () => clearTimeout(timer);
  }, [key]);
  return (
    <p class="hidden" role="status" aria-live="polite">
      {announced}
    </p>
  );
}
