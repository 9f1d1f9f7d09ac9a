/** The step time of the runs of one job over time, above the list, with its changes marked. Renders nothing for fewer than three runs. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { RunRow } from "../api/documents";
import type { HistoryDocument } from "../api/history-documents";
import { aborted, type Source } from "../api/source";
import { runLink } from "../route";
import { mostFrequentJob } from "../run/list-rows";
import { dateTime, duration, percent } from "../ui/format";
import "./history-chart.css";

const LAST = 50;
const FEWEST = 3;
const HEIGHT = 92;
const MARGIN = { top: 14, right: 8, bottom: 6, left: 58 };

export function HistoryChart({ source, rows, tag }: { source: Source; rows: readonly RunRow[]; tag: string }) {
  const job = mostFrequentJob(rows);
  const like = job[0]?.id ?? null;
  const [answer, setAnswer] = useState<HistoryDocument | null>(null);
  useEffect(() => {
    setAnswer(null);
    if (like === null || source.kind === "file") return;
    const stop = new AbortController();
    source
      .get<HistoryDocument>("history", { like, last: LAST, tag: tag || undefined }, stop.signal)
      .then(setAnswer, (error: unknown) => {
        if (!aborted(error)) setAnswer(null); // an older hub has no history
      });
    return () => stop.abort();
  }, [source, like, tag, job.length]);
  if (answer === null || answer.runs.length < FEWEST) return null;
  return (
    <section class="card history" aria-labelledby="history-title">
      <div class="history-head">
        <h2 id="history-title">Step time of the last {answer.runs.length} runs</h2>
        {answer.command.length > 0 && <code title={answer.command.join(" ")}>{answer.command.join(" ")}</code>}
      </div>
      <Chart answer={answer} />
      <ul class="history-sentences">
        {answer.sentences.map((text) => (
          <li key={text} class={text.startsWith("Slower") || text.startsWith("Gradually slower") ? "slower" : ""}>
            {text}
          </li>
        ))}
      </ul>
    </section>
  );
}

function Chart({ answer }: { answer: HistoryDocument }) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (box.current === null) return;
    const watch = new ResizeObserver(([entry]) => setWidth(entry?.contentRect.width ?? 0));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return <div ref={box}>{width > 0 && <Picture answer={answer} width={width} />}</div>;
}

function Picture({ answer, width }: { answer: HistoryDocument; width: number }) {
  const { runs } = answer;
  const times = runs.map((run) => run.step_ms);
  const [least, most] = [Math.min(...times), Math.max(...times)];
  // A change of a few percent should be visible, noise of a thousandth should not fill the picture.
  const room = Math.max((most - least) * 0.08, most * 0.01);
  const [low, high] = [Math.max(least - room, 0), most + room];
  const x = (at: number): number => MARGIN.left + ((width - MARGIN.left - MARGIN.right) * (at + 0.5)) / runs.length;
  const y = (ms: number): number => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - (ms - low) / (high - low));
  const usual = runs.map((run, at) => [x(at), y(run.step_ms), run.run] as const).filter(([, , id]) => !answer.unusual.includes(id));
  const changes = answer.changes.map((change) => ({ ...change, at: runs.findIndex((run) => run.run === change.run) }));
  return (
    <svg viewBox={`0 0 ${width} ${HEIGHT}`} role="group" aria-label={`Step time of ${runs.length} runs, from ${duration(least * 1e6)} to ${duration(most * 1e6)}`}>
      {[most, least].map((ms) => (
        <text key={ms} x={MARGIN.left - 8} y={y(ms) + 4} text-anchor="end">
          {duration(ms * 1e6)}
        </text>
      ))}
      <polyline class="history-line" points={usual.map(([left, top]) => `${left},${top}`).join(" ")} />
      {changes.map(({ run, change, at }) => {
        const left = (x(at - 1) + x(at)) / 2;
        const kind = change > 0 ? "slower" : "faster";
        return (
          <g key={run}>
            <line class={`history-change ${kind}`} x1={left} x2={left} y1={MARGIN.top - 2} y2={HEIGHT} />
            <text class={kind} x={left + 4} y={10}>
              {change > 0 ? "+" : "−"}
              {percent(Math.abs(change))}
            </text>
          </g>
        );
      })}
      {runs.map((run, at) => (
        <a key={run.id} href={runLink(run.id)} tabindex={-1} aria-label={`${run.name}: ${duration(run.step_ms * 1e6)}`}>
          <title>{`${run.name}: ${duration(run.step_ms * 1e6)}, ${dateTime(run.created_wall_ns)}${run.commit ? `, ${run.commit.slice(0, 8)}` : ""}`}</title>
          <circle class={answer.unusual.includes(run.run) ? "history-dot unusual" : "history-dot"} cx={x(at)} cy={y(run.step_ms)} r={runs.length > 30 ? 3 : 4} />
        </a>
      ))}
    </svg>
  );
}
