/** The captures of a run: when, which steps and ranks, why, what was found; and a button that requests one. */

import { useEffect, useState } from "preact/hooks";
import { encoded } from "../address";
import type { CaptureRecord, CapturesDocument } from "../api/capture-documents";
import { aborted } from "../api/source";
import { captureLink } from "../route";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { binary, clock, count, dateTime } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import { capturedRanks, capturedSteps, captureCost, isOver, newer, stateText, whyCaptured } from "../words/captures";
import { CaptureForm } from "./capture-form";
import "./captures.css";

const EVERY_MS = 5000;
const SOON_MS = 1000;
/** How long a request may stay without a record: the hub takes it within seconds. */
const PATIENCE_MS = 15_000;
const SHOWN = 10;

/** Renders nothing if there are none and none can be requested. */
export function CapturesPanel({ run }: { run: OpenRun }) {
  const usual = useAnswer<CapturesDocument>(run, "captures", {}, EVERY_MS).value;
  const [fresh, setFresh] = useState<CapturesDocument | null>(null);
  const [requestedMs, setRequestedMs] = useState(0);
  const [all, setAll] = useState(false);
  const found = newer(usual, fresh);
  const records = found?.captures ?? [];
  const active = records.some((record) => !isOver(record));
  const following = active || requestedMs > 0;
  useEffect(() => {
    // The run may make no step while one of its ranks writes a trace.
    if (!following) return;
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const later = (): void => void (timer = setTimeout(() => void (document.hidden ? later() : ask()), SOON_MS));
    const ask = async (): Promise<void> => {
      try {
        setFresh(await run.source.get<CapturesDocument>(`runs/${encoded(run.name)}/captures`, {}, stop.signal));
      } catch (error) {
        if (aborted(error)) return;
      }
      if (requestedMs > 0 && (active || performance.now() - requestedMs > PATIENCE_MS)) setRequestedMs(0);
      later();
    };
    later();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [run, following, active, requestedMs]);
  const may = (found?.may ?? []).includes("capture") && run.status.value?.over === false;
  if (found === null || (records.length === 0 && !may)) return null;
  return (
    <Card title="Captures" about="a few steps of some ranks, recorded by torch.profiler" part="captures" class="captures">
      {may && <CaptureForm run={run} busy={active || requestedMs > 0} onRequested={() => setRequestedMs(performance.now())} />}
      {requestedMs > 0 && !active && <p class="muted" role="status">Requested. The hub chooses the ranks and the steps …</p>}
      {records.length === 0 && requestedMs === 0 && <p class="muted">None so far.</p>}
      <ul class="capture-list">
        {(all ? records : records.slice(0, SHOWN)).map((record) => (
          <Line key={record.order.id} run={run.name} record={record} />
        ))}
      </ul>
      {records.length > SHOWN && (
        <button type="button" class="quiet" aria-expanded={all} onClick={() => setAll(!all)}>
          {all ? "Show fewer" : `Show all ${count(records.length)}`}
        </button>
      )}
    </Card>
  );
}

function Line({ run, record }: { run: string; record: CaptureRecord }) {
  const over = isOver(record);
  const cost = captureCost(record);
  const title = record.verdict || (record.state === "failed" ? record.problem || "failed" : stateText(record));
  return (
    <li>
      {record.state === "failed" ? <SeverityMark look="warning" /> : record.severity !== "" ? <SeverityMark look={record.severity} /> : <span aria-hidden="true">{over ? "●" : "…"}</span>}
      <div>
        <a href={captureLink(run, record.order.id)}>{title}</a>
        {record.differences.filter(({ text }) => text !== title).slice(0, 1).map((difference) => (
          <p key={difference.text}>{difference.text}</p>
        ))}
        <p class="facts" role={over ? undefined : "status"}>
          <span>{capturedSteps(record)}</span>
          <span>{capturedRanks(record)}</span>
          <span title={dateTime(record.requested_wall_ns)}>{clock(record.requested_wall_ns)}</span>
          <span>{whyCaptured(record)}</span>
          {record.verdict !== "" && <span>{stateText(record)}</span>}
          {record.size_bytes > 0 && <span>{binary(record.size_bytes)}</span>}
          {cost !== "" && <span>{cost}</span>}
        </p>
      </div>
    </li>
  );
}
