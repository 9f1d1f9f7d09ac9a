/** Every rank in every step as a color: which rank is slow, since when, and whether a whole host is. */

import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useId, useMemo, useRef } from "preact/hooks";
import type { NodesDocument } from "../api/node-documents";
import { HeatControl, marksOf } from "../charts/heat-control";
import type { Stat } from "../charts/heat-piece";
import type { Span } from "../charts/heat-picture";
import { figure, grainWords, onDevice, valueWords } from "../charts/heat-words";
import { ordered } from "../charts/palette";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import type { Csv } from "../ui/csv";
import { count, spans } from "../ui/format";
import "./heat-map.css";
import { HeatFoot } from "./heat-foot";
import { HeatSpoken, HeatTip } from "./heat-tip";
import { HeatTools } from "./heat-tools";

const ROW = 26;
const TALLEST = 380;
const AXES = 28;
const NODES_MS = 30_000;

/** Omitted for a single rank: the chart of its steps shows the same. */
export function HeatMap({ run }: { run: OpenRun }) {
  const status = run.status.value;
  const ranks = Math.max(status?.world_size ?? 0, status?.ranks ?? 0);
  if (status === null || ranks < 2) return null;
  if (run.steps.value === null || run.steps.value.first.length === 0) {
    return (
      <Card title="Ranks and steps">
        <Nothing>No step has ended yet.</Nothing>
      </Card>
    );
  }
  // A new attempt, or the end of the run, needs a new map.
  return <Map key={`${status.attempt} ${status.over}`} run={run} ranks={ranks} />;
}

function Map({ run, ranks }: { run: OpenRun; ranks: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const control = useSignal<HeatControl | null>(null);
  const picked = useSignal<string | null>(null);
  const value = useComputed(() => picked.value ?? (run.onDevice.value ? onDevice("work") : "work"));
  const stat = useSignal<Stat>("max");
  const help = useId();
  const nodes = useAnswer<NodesDocument>(run, "nodes", { limit: 2000 }, NODES_MS).value;
  const phases = run.status.value?.phases.join() ?? "";
  const timed = Object.keys(run.steps.value?.device_mean_ns ?? {}).join();
  const choices = useMemo(
    () => [...(timed ? ["work", "wall", ...ordered(timed.split(","))].map(onDevice) : []), "work", "wall", ...ordered(phases ? phases.split(",") : []), ...memoryOf(run)],
    [phases, timed, run.steps.value !== null],
  );
  const hosts = run.timed.value ? ["work", "wall", ...(phases ? phases.split(",") : [])] : [];
  const height = Math.min(TALLEST, ROW * ranks) + AXES;

  useEffect(() => {
    const place = canvas.current;
    const context = place?.getContext("2d", { alpha: true });
    if (!place || !context) return;
    const made = new HeatControl(run, place, context);
    control.value = made;
    const resize = (): void => made.heat.resize(place.clientWidth, place.clientHeight, devicePixelRatio || 1);
    resize();
    const watch = new ResizeObserver(resize);
    watch.observe(place);
    return () => {
      watch.disconnect();
      made.close();
      control.value = null;
    };
  }, [run]);
  useEffect(() => control.value?.setValue(value.value, stat.value), [control.value, value.value, stat.value]);
  useEffect(() => control.value?.setNodes(spansOf(nodes)), [control.value, nodes]);

  const now = control.value;
  return (
    <Card
      title="Ranks and steps"
      about={now?.piece.value ? grainWords(now.piece.value) : ""}
      tools={now && <HeatTools control={now} value={value.value} choose={(chosen) => (picked.value = chosen)} stat={stat} choices={choices} hosts={hosts} />}
      csv={{ name: `${run.name}-${value.value}-by-rank`, make: () => table(now) }}
    >
      <div class="heat">
        <canvas
          ref={canvas}
          style={{ height: `${height}px` }}
          class={now?.mode.value === "move" ? "moves" : ""}
          tabIndex={0}
          role="application"
          aria-roledescription="map"
          aria-label={summary(run, ranks, value.value, now)}
          aria-describedby={help}
          aria-busy={now?.busy.value ?? true}
          onKeyDown={(event) => {
            if (!event.ctrlKey && !event.metaKey && !event.altKey && now?.key(event.key)) event.preventDefault();
          }}
        />
        <p id={help} class="hidden">
          Arrow keys move from cell to cell, Enter selects the rank and step, plus and minus zoom, Home shows everything.
        </p>
        {now && <HeatTip control={now} nodes={spansOf(nodes)} />}
        {now && <HeatSpoken control={now} />}
      </div>
      {now && <HeatFoot run={run} control={now} value={value.value} />}
      {now?.failure.value && <Nothing>{now.failure.value.message}</Nothing>}
    </Card>
  );
}

/** Accessible description. */
function summary(run: OpenRun, ranks: number, value: string, control: HeatControl | null): string {
  const range = control?.range.value;
  const unit = control?.piece.value?.heat.unit ?? "ns";
  const marked = marksOf(run).map((mark) => mark.rank);
  return [
    `Map of ${valueWords(value)} for ${count(ranks)} ranks over steps.`,
    range ? `From ${figure(range.least, unit)} to ${figure(range.most, unit)}.` : "",
    marked.length ? `Findings for ${marked.length === 1 ? "rank" : "ranks"} ${spans(marked)}.` : "",
  ].join(" ");
}

function memoryOf(run: OpenRun): string[] {
  const levels = run.steps.peek()?.memory_bytes ?? {};
  return ["allocated", "reserved", "peak_allocated"].filter((name) => levels[name]?.some((level) => level !== null && level > 0));
}

function spansOf(nodes: NodesDocument | null): Span[] {
  const found = (nodes?.nodes ?? []).flatMap((node) => (node.rank_spans ?? []).map(([first, last]) => ({ name: node.hosts[0] ?? node.node, first, last })));
  return found.sort((one, two) => one.first - two.first);
}

function table(control: HeatControl | null): Csv | null {
  const piece = control?.piece.peek() ?? null;
  if (piece === null) return null;
  const { heat } = piece;
  const columns = heat.firstSteps.length;
  const scale = heat.unit === "ns" ? 1e6 : 1;
  const name = heat.unit === "ns" ? "ms" : "bytes";
  return {
    columns: ["first_rank", "last_rank", ...Array.from(heat.firstSteps, (first, at) => `step_${first}_to_${heat.lastSteps[at] ?? first}_${name}`)],
    rows: Array.from(heat.firstRanks, (first, row) => [
      first,
      heat.lastRanks[row] ?? first,
      ...Array.from(heat.cells.subarray(row * columns, (row + 1) * columns), (cell) => cell / scale),
    ]),
  };
}
