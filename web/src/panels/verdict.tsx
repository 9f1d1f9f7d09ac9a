/** The verdict: what is wrong, what it costs, the evidence and the advice; then all other findings. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Finding, FindingsDocument } from "../api/documents";
import type { OpenRun } from "../run/open-run";
import { count, percent } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import { isStop } from "../words/kinds";
import { countOf } from "../words/ranks";
import { stillIn } from "../words/standing";
import { Aftermath } from "./aftermath";
import { FindingBody, FindingFacts, findingKey, lookOf } from "./finding";
import "./verdict.css";

export function VerdictPanel({ run }: { run: OpenRun }) {
  const found = run.findings.value;
  const [first, ...others] = found?.findings ?? [];
  // A hub that shut down before its last check never marks its findings as final.
  const live = (found?.live ?? false) && run.status.value?.over !== true;
  return (
    <section class={`card verdict ${first === undefined ? "" : lookOf(first)}`} aria-label="Verdict">
      <Announced found={found} />
      {found === null ? <p class="muted">Loading the run …</p> : first === undefined ? <NothingYet run={run} found={found} live={live} /> : <Lead run={run} finding={first} found={found} live={live} />}
      <Aftermath run={run} />
      {others.length > 0 && <Others run={run} findings={others} live={live} />}
    </section>
  );
}

function Lead({ run, finding, found, live }: { run: OpenRun; finding: Finding; found: FindingsDocument; live: boolean }) {
  return (
    <>
      <div class="verdict-head">
        <SeverityMark look={lookOf(finding)} large />
        <div>
          {live && finding.kind.startsWith("hang_") && <p class="hang-word">The job is hung</p>}
          <h2>{finding.title}</h2>
          <FindingFacts finding={finding} live={live} />
        </div>
      </div>
      <FindingBody run={run} finding={finding} live={live} />
      <Judged found={found} live={live} />
    </>
  );
}

function Judged({ found, live }: { found: FindingsDocument; live: boolean }) {
  if (!found.live || found.judged === undefined) return null;
  const { first_step: first, step, ranks, of_ranks: all } = found.judged;
  const steps = first === undefined || first === null || first >= step ? `data up to step ${count(Math.max(0, step))}` : `steps ${count(first)} to ${count(step)}`;
  const more = !live ? ` ${ELSEWHERE}` : isStop(found.findings[0]?.kind ?? "") ? "" : " A finding appears when two checks agree, and disappears when it no longer holds.";
  return (
    <p class="muted small">
      Based on {steps}{stillIn(found.findings) === null ? "" : ", the last that ended"}, {ranks < all ? `${count(ranks)} of ${countOf(all, "rank")}` : countOf(all, "rank")}.{more}
    </p>
  );
}

function NothingYet({ run, found, live }: { run: OpenRun; found: FindingsDocument; live: boolean }) {
  const status = run.status.value;
  const judged = found.judged;
  const made = (status?.newest_step ?? -1) + 1;
  const lost = run.connection.value === "lost" || run.connection.value === "gone";
  const known = !found.live ? "final" : !live ? "unfinal" : lost ? "lost" : "live";
  const [head, more] = nothingText(known, made, status?.ranks ?? 0, status?.world_size ?? 0, judged?.collecting);
  return (
    <div class="verdict-head">
      <span class="severity info large" aria-hidden="true">
        {live ? "…" : "●"}
      </span>
      <div>
        <h2>{head}</h2>
        <p class="muted">{more}</p>
        {judged !== undefined && judged.looks > 0 && (
          <p class="muted small">
            {countOf(judged.looks, "check")}{live ? " so far" : " while it ran"}, the last at step {count(Math.max(0, judged.step))} with {count(judged.ranks)} of {countOf(judged.of_ranks, "rank")}.
          </p>
        )}
      </div>
    </div>
  );
}

const ELSEWHERE = "The verdict on the whole run is in summary.txt and report.html in its folder.";

/**
 * A heading and a sentence for a run without findings. `known`: the run is active (`live`); it ended and was fully analyzed
 * (`final`), or its hub shut down before that (`unfinal`); or its state is unknown because the hub is silent (`lost`).
 * `collecting`: the hub's sentence about how many steps it still needs; empty: it has enough.
 */
export function nothingText(known: "live" | "lost" | "unfinal" | "final", steps: number, ranks: number, worldSize: number, collecting = ""): [string, string] {
  const live = known === "live";
  if (known === "unfinal" && steps > 0) return ["The run has ended; the final verdict did not reach this page.", ELSEWHERE];
  if (known === "lost" && steps > 0) return ["The state of the run is unknown.", `There were no findings at the last update. ${ELSEWHERE.replace(" is in ", " will be in ")}`];
  if (ranks === 0) {
    return live
      ? ["No rank has reported yet.", "Ranks report when their first step begins, after imports and the setup of process groups."]
      : ["Nothing was recorded.", "No process reported a step: the script has none, or the recorder was not loaded (python -I or -E, env -i, a container or ssh prevent it)."];
  }
  const who = worldSize > ranks ? `${count(ranks)} of ${countOf(worldSize, "rank")}` : countOf(ranks, "rank");
  if (steps === 0) return [`${who}, no steps${live ? " yet" : ""}.`, live ? "The first step is often slow: compilation, caches, the first batch." : "The recorder was loaded, but saw no training step."];
  if (live && collecting !== "") return [collecting, "Bottlenecks and slow ranks are reported once there are enough steps; hangs and crashes at once."];
  return live
    ? ["Nothing wrong so far.", `${countOf(steps, "step")} of ${who}. A finding is shown once two checks agree.`]
    : ["Nothing was found.", `${countOf(steps, "step")} of ${who}.`];
}

function Others({ run, findings, live }: { run: OpenRun; findings: readonly Finding[]; live: boolean }) {
  return (
    <div class="others">
      <h3>Also found</h3>
      {findings.map((finding) => (
        <OtherFinding key={findingKey(finding)} run={run} finding={finding} live={live} />
      ))}
    </div>
  );
}

function OtherFinding({ run, finding, live }: { run: OpenRun; finding: Finding; live: boolean }) {
  // Collapsed findings are not rendered: a run may have dozens, each with charts.
  const [open, setOpen] = useState(false);
  return (
    <details class={`other ${finding.severity}`} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <SeverityMark look={lookOf(finding)} />
        <span class="other-title">{finding.title}</span>
        {finding.cost?.share ? <span class="other-share">{percent(finding.cost.share)}</span> : null}
      </summary>
      {open && (
        <>
          <FindingFacts finding={finding} live={live} />
          <FindingBody run={run} finding={finding} live={live} />
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
  const [said, setSaid] = useState("");
  useEffect(() => {
    const known = before.current;
    before.current = key;
    if (key === null || known === null || known === key) return;
    setSaid(finding === undefined ? "The verdict was withdrawn." : `New verdict: ${finding.title}`);
    const timer = setTimeout(() => setSaid(""), SAID_MS);
    return () => clearTimeout(timer);
  }, [key]);
  return (
    <p class="hidden" role="status" aria-live="polite">
      {said}
    </p>
  );
}
