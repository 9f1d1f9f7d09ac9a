/** Output of the selected rank: at the selected step, or the end of the log, followed while the run is active. */

import { useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { RankDocument, SamplesDocument } from "../api/documents";
import { marksOf, placeAt } from "../logs/log-place";
import { LogReader } from "../logs/log-reader";
import { StepClock } from "../run/align";
import { useAnswer, useAsked, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { download } from "../ui/csv";
import { clock, count } from "../ui/format";
import { LogEnd } from "./log-end";
import { LogView } from "./log-view";
import "./logs.css";
import { rankOf } from "./rank";

const FOLLOW_MS = 1000;
/** Log sizes are requested for this long before and after a step. */
const AROUND_NS = 120e9;

export function LogsPanel({ run }: { run: OpenRun }) {
  const rank = rankOf(run);
  if (rank === null) return null;
  return <Logs key={rank} run={run} rank={rank} />;
}

function Logs({ run, rank }: { run: OpenRun; rank: number }) {
  const step = run.step.value;
  const answer = useAnswer<RankDocument>(run, `ranks/${rank}`, step === null ? { bins: 1 } : { bins: 1, first: step, last: step }, 5000);
  const about = answer.value?.rank === rank ? answer.value : null;
  const path = about?.log ?? null;
  const reader = useMemo(
    () => (path === null ? null : new LogReader((params, signal) => run.source.file(run.name, path, params, signal))),
    [run, path],
  );
  useEffect(() => () => reader?.close(), [reader]);
  const moment = about === null || step === null ? null : momentOf(run, about, step);
  const place = usePlace(run, about, moment);
  const here = step === null ? null : place.value;
  const live = run.status.value?.over === false && typeof about?.now["ended_wall_ns"] !== "number";
  const wanted = useSignal("");

  useEffect(() => {
    if (reader !== null && (step === null || !place.asking)) void reader.open(here);
  }, [reader, step, here, place.asking]);
  useFollowing(reader, live && step === null);

  const title = `Output of rank ${rank}`;
  // It printed nothing, or its output is not kept.
  if (about !== null && path === null && !about.error) return null;
  if (reader === null || !reader.loaded.value) {
    return (
      <Card title={title}>
        <Nothing>{absence(answer.failure?.message ?? null, reader, about !== null)}</Nothing>
        {about && <LogEnd run={run} rank={about} />}
      </Card>
    );
  }
  if (!live && reader.log.value.lines.length === 0 && reader.failure.value === null && !about?.error) return null;
  return (
    <Card title={title} about={aboutWords(step, moment, live)} tools={<Tools reader={reader} wanted={wanted} name={`${run.name}-rank-${rank}`} />}>
      {step !== null && here === null && !place.asking && (
        <p class="log-note">{moment === null ? `The time of step ${count(step)} is no longer known.` : "This run has no record of its log sizes."} Showing the end of the log.</p>
      )}
      {reader.failure.value && <p class="log-note">{reader.failure.value.message}</p>}
      {reader.log.value.lines.length === 0 ? (
        <Nothing>{live ? "No output so far." : "No output."}</Nothing>
      ) : (
        <LogView reader={reader} here={here} hereText={step === null ? "" : `step ${count(step)} begins about here${moment === null ? "" : `, ${clock(moment)}`}`} follows={live && step === null} wanted={wanted.value} label={title} />
      )}
      {about && <LogEnd run={run} rank={about} />}
    </Card>
  );
}

function absence(trouble: string | null, reader: LogReader | null, known: boolean): string {
  const failure = reader?.failure.value;
  if (failure?.trouble === "missing" || (known && reader === null)) return "This rank has no log: it printed nothing, or its output is not kept.";
  return failure?.message ?? trouble ?? "Loading the output …";
}

function aboutWords(step: number | null, moment: number | null, live: boolean): string {
  if (step !== null) return moment === null ? `step ${count(step)}` : `at step ${count(step)}, ${clock(moment)}`;
  return live ? "live" : "end of the log";
}

function Tools({ reader, wanted, name }: { reader: LogReader; wanted: { value: string }; name: string }) {
  return (
    <>
      <span class="log-search">
        <input type="search" placeholder="search" aria-label="Search the loaded lines" value={wanted.value} onInput={(event) => (wanted.value = event.currentTarget.value)} />
      </span>
      <button
        type="button"
        class="quiet"
        title="Download the loaded lines"
        onClick={() =>
          download(
            `${name}.txt`,
            reader.log
              .peek()
              .lines.map((line) => line.text)
              .join("\n"),
            "text/plain",
          )
        }
      >
        Save
      </button>
    </>
  );
}

/** Start of the step in that rank, or in all ranks if its own is no longer available. */
function momentOf(run: OpenRun, rank: RankDocument, step: number): number | null {
  const at = rank.steps.first.findIndex((first, bin) => first <= step && step <= (rank.steps.last[bin] ?? first));
  const own = rank.steps.start_wall_ns[at];
  if (own !== undefined) return own;
  return run.steps.value === null ? null : new StepClock(run.steps.value).wall(step);
}

/** Position of that time in the log; `value` null: unknown. */
function usePlace(run: OpenRun, rank: RankDocument | null, moment: number | null): { value: number | null; asking: boolean } {
  const node = typeof rank?.now["node"] === "string" ? rank.now["node"] : null;
  const pid = typeof rank?.identity["pid"] === "number" ? rank.identity["pid"] : null;
  const found = useAsked<SamplesDocument>(run, JSON.stringify(["log place", node, moment]), 3_600_000, (stop) =>
    node === null || moment === null
      ? null
      : run.get<SamplesDocument>("samples", { kind: "process", fields: "log_bytes", nodes: node, first_ns: Math.round(moment - AROUND_NS), last_ns: Math.round(moment + AROUND_NS), bins: 2048, stat: "last", limit: 1024 }, stop),
  );
  const asking = moment !== null && node !== null && found.value === null && found.failure === null;
  if (found.value === null || rank === null || moment === null) return { value: null, asking: asking || rank === null };
  return { value: placeAt(marksOf(found.value, rank.rank, pid), moment), asking: false };
}

/** Read new output periodically. */
export function useFollowing(reader: LogReader | null, follows: boolean): void {
  const busy = useRef(false);
  useEffect(() => {
    if (!follows || reader === null) return;
    const timer = setInterval(() => {
      if (busy.current || !reader.loaded.peek()) return;
      busy.current = true;
      void reader.follow().finally(() => (busy.current = false));
    }, FOLLOW_MS);
    return () => clearInterval(timer);
  }, [reader, follows]);
}
