/** Events as sentences, newest first, with filters by kind, severity and rank. */

import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { RunEvent, StepsDocument } from "../api/documents";
import { StepClock } from "../run/align";
import { eventRows, stepOfEvent, type EventRow } from "../run/event-rows";
import type { OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import type { Csv } from "../ui/csv";
import { clock, count, dateTime } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import { countOf } from "../words/ranks";
import { RankButton } from "./rank-button";
import "./events.css";

/** Rows shown at first; a button shows more. */
const PAGE = 60;
const RANK_BUTTONS = 3;
/** Shown only if chosen: there are several for each step, and their numbers are charts. */
const NOTES = "notes";

export function EventsPanel({ run }: { run: OpenRun }) {
  const kind = useSignal("");
  const serious = useSignal(false);
  const ofRank = useSignal(false);
  const shown = useSignal(PAGE);
  /** The events at the time when following was turned off; null: new events are shown. */
  const held = useSignal<readonly RunEvent[] | null>(null);
  const all = run.events.value;
  const events = held.value ?? all;
  const rank = run.rank.value;
  const steps = run.steps.value;
  const stepClock = useMemo(() => (steps === null ? null : stepsOf(steps)), [steps]);
  const kinds = useMemo(() => [...new Set(all.map((event) => event.category))].sort(), [all]);
  const rows = useMemo(() => eventRows(events), [events]);
  const chosen = rows.filter(
    (row) => (kind.value ? row.category === kind.value : row.category !== NOTES) && (!serious.value || row.severity !== "info") && (!ofRank.value || rank === null || row.ranks.includes(rank)),
  );
  const fresh = all.length > 0 && held.value !== null ? all.filter((event) => event.number > (held.value?.at(-1)?.number ?? 0)).length : 0;
  return (
    <Card
      title="Events"
      class="half events"
      about={rows.length > 0 ? "newest first" : undefined}
      {...(rows.length === 0 ? {} : { csv: { name: `${run.name}-events`, make: () => table(events, stepClock) } })}
      tools={
        rows.length > 0 && (
          <>
            <label>
              <span class="hidden">Kind of event</span>
              <select value={kind.value} onChange={(event) => (kind.value = event.currentTarget.value)}>
                <option value="">{kinds.includes(NOTES) ? "all but notes" : "all kinds"}</option>
                {kinds.map((name) => (
                  <option key={name} value={name}>
                    {name}
                  </option>
                ))}
              </select>
            </label>
            <label class="check">
              <input type="checkbox" checked={serious.value} onChange={(event) => (serious.value = event.currentTarget.checked)} /> only problems
            </label>
            {rank !== null && (
              <label class="check">
                <input type="checkbox" checked={ofRank.value} onChange={(event) => (ofRank.value = event.currentTarget.checked)} /> only rank {rank}
              </label>
            )}
            {run.status.value?.over === false && (
              <button type="button" class="quiet" aria-pressed={held.value === null} title="Show new events as they arrive" onClick={() => (held.value = held.value === null ? all : null)}>
                {held.value === null ? "Following" : fresh > 0 ? `Follow (${count(fresh)} new)` : "Follow"}
              </button>
            )}
          </>
        )
      }
    >
      {chosen.length === 0 ? (
        <Nothing>{rows.length > 0 ? "No matching events." : run.status.value === null ? "Loading the run …" : run.status.value.over ? "No events were recorded." : "No events yet."}</Nothing>
      ) : (
        <div class="events-list" tabIndex={0} role="region" aria-label="List of events">
          <ol>
            {chosen.slice(0, shown.value).map((row) => (
              <Line key={row.key} run={run} row={row} at={stepClock === null ? null : stepOfEvent({ event: row.event, wall_ns: row.wallNs }, stepClock)} />
            ))}
          </ol>
          {chosen.length > shown.value && (
            <button type="button" class="quiet" onClick={() => (shown.value += PAGE)}>
              {countOf(chosen.length - shown.value, "more row")}
            </button>
          )}
        </div>
      )}
    </Card>
  );
}

function Line({ run, row, at }: { run: OpenRun; row: EventRow; at: number | null }) {
  return (
    <li class={row.severity}>
      <time dateTime={new Date(row.wallNs / 1e6).toISOString()} title={dateTime(row.wallNs)}>
        {clock(row.wallNs)}
      </time>
      <span class="events-step">
        {at !== null && (
          <button type="button" class="quiet" aria-label={`Show step ${at}`} aria-pressed={run.step.value === at} onClick={() => (run.step.value = at)}>
            step {count(at)}
          </button>
        )}
      </span>
      <span class="events-text">
        {row.severity !== "info" && <SeverityMark look={row.severity} />} {row.text}{" "}
        {row.ranks.length <= RANK_BUTTONS && row.ranks.map((rank) => <RankButton key={rank} run={run} rank={rank} />)}
      </span>
    </li>
  );
}

type Steps = Parameters<typeof stepOfEvent>[1];

function stepsOf(steps: StepsDocument): Steps {
  const stepClock = new StepClock(steps);
  return { first: steps.first[0] ?? 0, step: (wallNs) => stepClock.step(wallNs) };
}

function table(events: readonly RunEvent[], stepClock: Steps | null): Csv {
  return {
    columns: ["number", "time", "event", "node", "rank", "step", "text"],
    rows: events.map((event) => {
      const step = stepClock === null ? null : stepOfEvent(event, stepClock);
      return [event.number, new Date(event.wall_ns / 1e6).toISOString(), event.event, String(event.node), event.rank ?? null, step, event.text];
    }),
  };
}
