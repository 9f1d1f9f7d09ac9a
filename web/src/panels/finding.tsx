/** One finding: cost, evidence, advice and links. Used for the verdict and all other findings. */

import type { Finding } from "../api/documents";
import type { OpenRun } from "../run/open-run";
import { reveal } from "../ui/card";
import { severityWord } from "../ui/severity";
import { count } from "../ui/format";
import { tell } from "../ui/toast";
import { Evidence } from "./evidence";
import { PictureView } from "./picture";
import { PriceView } from "./price";
import { chooseRank } from "./rank-button";

const RANKS_SHOWN = 4;

/** Identifies a finding across checks, although its figures change. */
export function findingKey({ kind, ranks, phase }: Pick<Finding, "kind" | "ranks" | "phase">): string {
  return JSON.stringify([kind, ranks, phase]);
}

export function FindingBody({ run, finding }: { run: OpenRun; finding: Finding }) {
  const { charts: pictures, confidence, evidence, meaning, price, time_left: left } = finding.text;
  return (
    <div class="finding-body">
      {price.length > 0 && <PriceView words={price} left={left} />}
      <div class={`finding-columns ${pictures.length === 0 ? "without-pictures" : ""}`}>
        {finding.advice.length > 0 && (
          <div>
            <h3>What to do</h3>
            <ol class="advice">
              {finding.advice.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ol>
          </div>
        )}
        {pictures.length > 0 && (
          <div class="pictures">
            {pictures.map((picture) => (
              <PictureView key={picture.title} picture={picture} />
            ))}
          </div>
        )}
      </div>
      <Jumps run={run} finding={finding} />
      <details class="fold">
        <summary>Evidence</summary>
        <p class="muted">
          {meaning} Confidence: {confidence}.
        </p>
        <Evidence rows={evidence} />
      </details>
    </div>
  );
}

/** Severity, kind, ranks, phase and steps in one line. */
export function FindingFacts({ finding: { text } }: { finding: Finding }) {
  return (
    <p class="facts">
      <span class={`severity ${text.look}`}>{severityWord(text.look)}</span>
      {text.facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </p>
  );
}

function Jumps({ run, finding }: { run: OpenRun; finding: Finding }) {
  const { kind, ranks } = finding;
  // A step that never ended is not in any chart.
  const steps = finding.steps !== null && finding.steps[0] > (run.status.value?.newest_step ?? Infinity) ? null : finding.steps;
  const chosen = run.rank.value;
  const view = run.view.value;
  const looking = steps !== null && view !== null && view.first === Math.max(0, steps[0]) && view.last === steps[1];
  if (ranks.length === 0 && steps === null) return null;
  return (
    <div class="jumps">
      {ranks.slice(0, RANKS_SHOWN).map((rank) => (
        <button
          key={rank}
          type="button"
          aria-pressed={chosen === rank}
          onClick={() => {
            chooseRank(run, rank);
          }}
        >
          Show rank {rank}
        </button>
      ))}
      {ranks.length > RANKS_SHOWN && <span class="muted">and {ranks.length - RANKS_SHOWN} more ranks</span>}
      {steps !== null && (
        <button
          type="button"
          aria-pressed={looking}
          onClick={() => {
            run.view.value = looking ? null : { first: Math.max(0, steps[0]), last: steps[1] };
            if (steps[0] === steps[1]) run.step.value = steps[0];
            if (looking) tell("All steps are shown again.");
            else reveal("steps");
          }}
        >
          Show {kind === "rank_crashed" ? "the last complete step" : steps[0] === steps[1] ? `step ${count(steps[0])}` : "these steps"}
        </button>
      )}
    </div>
  );
}
