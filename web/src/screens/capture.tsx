/** A capture of a run: how far it is, then what its traces show, with what one rank does longer than the other. */

import { useEffect, useState } from "preact/hooks";
import { LIST, encoded } from "../address";
import type { CaptureRecord, CapturesDocument, CaptureState, Difference } from "../api/capture-documents";
import type { ViewPart } from "../api/report-document";
import { aborted, Failure, type Source } from "../api/source";
import { made, type Made } from "../api/trace-data";
import { PartView } from "../panels/report-part";
import { captureLink, go, runLink } from "../route";
import { asFailure } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { binary, dateTime, duration } from "../ui/format";
import { useShortcuts } from "../ui/shortcuts";
import { baselineOf, capturedRanks, capturedSteps, captureCost, isOver, stateText, whyCaptured } from "../words/captures";
import "../panels/captures.css";
import { OutOfDate } from "./out-of-date";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { Standing, Traces } from "./trace";
import { TroubleScreen } from "./trouble";

const AGAIN_MS = 1000;
const AFTER_FAILURE_MS = 5000;
const MOST_LISTED = 1000;
const STAGES: readonly CaptureState[] = ["ordered", "profiling", "delivering", "analyzing"];

export function CaptureScreen({ source, name, id }: { source: Source; name: string; id: string }) {
  const [record, setRecord] = useState<CaptureRecord | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [turn, setTurn] = useState(0);
  const place = `runs/${encoded(name)}/captures/${encoded(id)}`;
  useShortcuts("Capture", [
    { keys: "g r", words: "go to the run", act: () => go({ screen: "run", runs: [name], capture: null }) },
    { keys: "g l", words: "go to the list of runs", act: () => go(LIST) },
  ]);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const later = (ms = AGAIN_MS): void => void (timer = setTimeout(() => void (document.hidden ? later(ms) : ask()), ms));
    const ask = async (): Promise<void> => {
      try {
        // The list: the record alone comes with the whole analysis.
        const { captures } = await source.get<CapturesDocument>(`runs/${encoded(name)}/captures`, { limit: MOST_LISTED }, stop.signal);
        const found = captures.find(({ order }) => order.id === id);
        if (found === undefined) throw new Failure("missing", "There is no such capture.");
        setRecord(found);
        setFailure(null);
        if (!isOver(found)) later();
      } catch (error) {
        if (aborted(error)) return;
        const failed = asFailure(error);
        setFailure(failed);
        if (failed.trouble !== "missing" && failed.trouble !== "refused") later(AFTER_FAILURE_MS);
      }
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, name, id, turn]);
  const title = `Capture ${id}`;
  const bar = (
    <a href={runLink(name)}>
      Run <bdi>{name}</bdi>
    </a>
  );
  if (failure?.trouble === "missing") return <Standing title={title} bar={bar} heading="Capture not found" words="It may have been removed to limit the size of the run." />;
  if (failure !== null && (record === null || failure.trouble === "refused")) return <TroubleScreen failure={failure} source={source} what={title} onAgain={() => setTurn(turn + 1)} />;
  const baseline = record === null ? null : baselineOf(record);
  if (record !== null && isOver(record) && record.files.length > 0) {
    const lead = (
      <>
        <About record={record} name={name} />
        {baseline !== null && <SinceBaseline source={source} path={`${place}/view/baseline`} steps={baseline.steps} />}
      </>
    );
    return <Traces source={source} path={`${place}/view`} title={title} what="Capture" bar={bar} lead={lead} />;
  }
  return (
    <>
      <ScreenBar home title={title}>
        {bar}
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy={record === null}>
        {failure !== null && <OutOfDate />}
        {record === null ? <p class="nothing">Reading the capture …</p> : <About record={record} name={name} />}
      </main>
    </>
  );
}

function About({ record, name }: { record: CaptureRecord; name: string }) {
  const baseline = baselineOf(record);
  const cost = captureCost(record);
  const problems = record.reports.filter(({ problem }) => problem !== "");
  return (
    <Card title="Capture" about={stateText(record)} class="captures">
      <p class="facts">
        <span>{capturedSteps(record)}</span>
        <span>{capturedRanks(record)}</span>
        <span>{whyCaptured(record)}</span>
        <span>{dateTime(record.requested_wall_ns)}</span>
        {record.size_bytes > 0 && <span>{binary(record.size_bytes)}</span>}
        {cost !== "" && <span>{cost}</span>}
      </p>
      {!isOver(record) && (
        <ol class="capture-stages">
          {STAGES.map((stage) => (
            <li key={stage} aria-current={stage === record.state ? "step" : undefined}>
              {stage}
            </li>
          ))}
        </ol>
      )}
      {record.problem !== "" && <p role="note">{record.problem}</p>}
      {problems.length > 0 && (
        <ul class="plain-list">
          {problems.map(({ rank, problem }) => (
            <li key={rank}>
              Rank {rank}: {problem}
            </li>
          ))}
        </ul>
      )}
      {record.differences.length > 0 && (
        <>
          <h3>What the ranks do differently</h3>
          <Differences rows={record.differences} />
        </>
      )}
      {baseline !== null && (
        <>
          <h3>
            Since the <a href={captureLink(name, baseline.id)}>baseline</a>
          </h3>
          {record.changes?.length ? <Differences rows={record.changes} /> : <p class="muted">No rank works longer than in the baseline.</p>}
        </>
      )}
    </Card>
  );
}

function Differences({ rows }: { rows: readonly Difference[] }) {
  return (
    <ul class="plain-list">
      {rows.map((difference, at) => (
        <li key={at}>
          {difference.text || `Rank ${difference.rank}: ${difference.name}, ${duration(difference.extra_ns)} longer than rank ${difference.peer} in a step.`}
          {difference.line !== "" && !difference.text.includes(difference.line) && (
            <>
              {" "}
              <code>{difference.line}</code>
            </>
          )}
        </li>
      ))}
    </ul>
  );
}

/** The operators and kernels of the slow rank next to those of the baseline, once the user wants to see them. */
function SinceBaseline({ source, path, steps }: { source: Source; path: string; steps: readonly [number, number] }) {
  const [open, setOpen] = useState(false);
  const [parts, setParts] = useState<ViewPart[] | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!open || parts !== null) return;
    const stop = new AbortController();
    made<{ parts: ViewPart[] } & Made>(source, path, {}, stop.signal).then(
      (found) => setParts(found.parts),
      (error: unknown) => {
        if (!aborted(error)) setProblem(asFailure(error).message);
      },
    );
    return () => stop.abort();
  }, [open, source, path]);
  return (
    <>
      <p>
        <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
          {open ? "Hide the baseline" : "Compare operators with the baseline"}
        </button>{" "}
        <span class="muted">
          Steps {steps[0]} to {steps[1]}
        </span>
      </p>
      {open && problem !== "" && <Nothing>{problem}</Nothing>}
      {open && problem === "" && parts === null && <Nothing>Reading both captures …</Nothing>}
      {open && parts?.map((part, at) => <PartView key={at} part={part} file="since-baseline" />)}
    </>
  );
}
