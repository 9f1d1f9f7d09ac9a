/** A current or past hang: which rank blocks the job, at which line, which ranks wait, and where each rank is. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Hang, HangsDocument } from "../api/hang-documents";
import { useAnswer, type OpenRun } from "../run/open-run";
import { clock, dateTime, duration } from "../ui/format";
import { useNow } from "../ui/now";
import { SeverityMark } from "../ui/severity";
import { Circle } from "./circle";
import { FlightView } from "./flight";
import { RankButton } from "./rank-button";
import { StacksView } from "./stacks";
import { WhereaboutsTable } from "./whereabouts";
import "./hang.css";

const SHOWN = 5;

/** Renders nothing if the job never hung. */
export function HangPanel({ run }: { run: OpenRun }) {
  const goesOn = run.status.value?.over === false;
  // For an active run, an event tells when there is a hang to load.
  const hung = !goesOn || run.events.value.some((event) => event.event === "hang") || run.findings.value?.findings.some((finding) => finding.kind.startsWith("hang_"));
  const hangs = useAnswer<HangsDocument>(run, hung ? "hangs" : null, {}, 3000).value?.hangs ?? [];
  if (hangs.length === 0) return null;
  // The last one first: it may be ongoing.
  const [latest, ...earlier] = [...hangs].reverse();
  if (latest === undefined) return null;
  return (
    <>
      <HangCard run={run} hang={latest} now={goesOn && latest.over === null} />
      {earlier.length > 0 && <EarlierHangs run={run} hangs={earlier} />}
    </>
  );
}

function HangCard({ run, hang, now }: { run: OpenRun; hang: Hang; now: boolean }) {
  const word = hang.text.heading;
  // The verdict right above has the same title; show only the details here.
  const titleShown = run.findings.value?.findings[0]?.kind === hang.kind;
  return (
    <section class={`card hang ${now ? "now" : ""}`} aria-label={now ? "The job hangs" : "The job hung"}>
      <div class="hang-head" role={now ? "alert" : undefined}>
        <SeverityMark look={hang.text.look} large />
        <div>
          {!titleShown && <p class="hang-word">{word}</p>}
          {titleShown && now && <p class="hidden">{word}</p>}
          <h2>{!titleShown ? hang.title : now ? "Details of the hang" : word}</h2>
        </div>
      </div>
      <Since run={run} hang={hang} now={now} />
      <HangBody run={run} hang={hang} now={now} titleShown={titleShown} />
    </section>
  );
}

function EarlierHangs({ run, hangs }: { run: OpenRun; hangs: readonly Hang[] }) {
  return (
    <section class="card" aria-label="Earlier hangs">
      <h2>Earlier hangs</h2>
      {hangs.slice(0, SHOWN).map((hang) => (
        <Folded key={`${hang.host} ${hang.number}`} run={run} hang={hang} />
      ))}
      {hangs.length > SHOWN && <p class="muted">and {hangs.length - SHOWN} more in the run’s hangs/ folder</p>}
    </section>
  );
}

function Folded({ run, hang }: { run: OpenRun; hang: Hang }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="other" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span class="other-title">
          {dateTime(hang.stopped_wall_ns)}: {hang.title}
        </span>
      </summary>
      {open && (
        <div class="finding-body">
          <Since run={run} hang={hang} now={false} />
          <HangBody run={run} hang={hang} now={false} titleShown={false} />
        </div>
      )}
    </details>
  );
}

/** How long it has lasted, updated every second by the run's clock. */
function Since({ run, hang, now }: { run: OpenRun; hang: Hang; now: boolean }) {
  const nowMs = useNow(now ? 1000 : 0, run.now);
  return (
    <p class="hang-since">
      {hang.text.since.replace("{duration}", duration(Math.max(nowMs * 1e6, hang.declared_wall_ns) - hang.stopped_wall_ns, true))} <span class="muted">Last activity: {dateTime(hang.stopped_wall_ns)}.</span> {hang.action && <span>Stepscope {hang.action}.</span>}
    </p>
  );
}

/** `titleShown`: the title is already shown above, so do not repeat its content. */
function HangBody({ run, hang, now, titleShown }: { run: OpenRun; hang: Hang; now: boolean; titleShown: boolean }) {
  const { culprits, waiting, call, stacks, flight, meaning, ring } = hang.text;
  return (
    <>
      <div class="hang-sides">
        <Side title={hang.undecidable ? "The culprit cannot be determined" : now ? "What blocks the job" : "What blocked the job"}>
          <ul class="who">
            {culprits.rows.map(({ ranks, reason, where }) => (
              <li key={`${reason} ${ranks.join()}`}>
                <RankButtons run={run} ranks={ranks} /> {!(titleShown && where !== null && hang.title.includes(reason)) && <span class="reason">{reason}</span>}
                {where !== null && (
                  <code class="line" title={where.file}>
                    {where.text}
                  </code>
                )}
              </li>
            ))}
            {culprits.left > 0 && <li class="muted">and {culprits.left} more places</li>}
            {culprits.rows.length === 0 && <li class="muted">{hang.undecidable ? "The available data does not identify the rank." : "No rank was identified."}</li>}
          </ul>
        </Side>
        {waiting !== "" && (
          <Side title={now ? "Waiting" : "Waited"}>
            <p>
              {waiting}
              {call !== "" && (
                <>
                  {" "}
                  in <code class="line">{call}</code>
                </>
              )}
            </p>
          </Side>
        )}
        {hang.cycle.length > 0 && (
          <Side title="Wait cycle">
            <Circle ring={ring} cycle={hang.cycle} />
          </Side>
        )}
        {hang.evidence.length > 0 && (
          <Side title={`Evidence, as of ${clock(hang.declared_wall_ns)}`}>
            <ul class="plain-list">
              {hang.evidence.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ul>
          </Side>
        )}
      </div>
      {hang.parts.length > 1 && (
        <details class="fold">
          <summary>Combined from {hang.parts.length} hosts; what each host saw</summary>
          <ul class="plain-list">
            {hang.parts.slice(0, 64).map((part) => (
              <li key={`${part.host} ${part.number}`}>
                {part.host}: {part.title}
              </li>
            ))}
          </ul>
        </details>
      )}
      <WhereaboutsTable run={run} hang={hang} now={now} />
      <StacksView stacks={stacks} />
      {flight !== null && <FlightView flight={flight} />}
      <p class="muted small">
        {now && `${meaning} `}Full record: <code>{hang.file}</code> in the run’s folder.
      </p>
    </>
  );
}

function Side({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div>
      <h3>{title}</h3>
      {children}
    </div>
  );
}

function RankButtons({ run, ranks }: { run: OpenRun; ranks: readonly number[] }) {
  return (
    <>
      {ranks.slice(0, 6).map((rank) => (
        <RankButton key={rank} run={run} rank={rank} />
      ))}
      {ranks.length > 6 && <span class="muted">and {ranks.length - 6} more</span>}
    </>
  );
}
