/** The layers of the model in a sampled step: which hold the memory, which take the time, and the gradients. */

import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { LayerRow, LayersDocument, NoLayers } from "../api/layer-documents";
import type { Cell } from "../charts/cells";
import { CellPicture } from "../charts/cell-picture";
import { Plot } from "../charts/plot";
import type { Tip } from "../charts/tip";
import { useAnswer, type OpenRun } from "../run/open-run";
import { useSlowly } from "../run/slowly";
import { extent } from "../run/stretch";
import { Card } from "../ui/card";
import { bytes, count } from "../ui/format";
import { levelsOf, memoryCells, passUs, pathTo, ROW_PX, timeCells, titleOf, nameInside } from "./layer-cells";
import { kindProperty, layersTable, passProperty, rankOfVerdict, timelineChart, timelineLines } from "./layer-figures";
import { GradientTable, LayerTable } from "./layer-tables";
import { stepAxis } from "./step-axis";
import "./layers.css";

const MAP_PX = 340;
const EVERY_MS = 10_000;
const CALM_MS = 1000;
/** More ranks are chosen with the field at the top. */
const MOST_CHOICES = 256;

type Answer = LayersDocument | NoLayers;

/** Renders nothing if no step was sampled. */
export function LayersPanel({ run }: { run: OpenRun }) {
  const usual = useAnswer<Answer>(run, "layers", {}, EVERY_MS).value;
  const named = rankOfVerdict(run.findings.value?.findings ?? [], usual?.rank === null ? [] : (usual?.ranks ?? []));
  const [rank, step] = [run.rank.value ?? named, run.step.value];
  const there = usual !== null && usual.rank !== null && (rank === null || usual.ranks.includes(rank));
  const special = there && (rank !== null || step !== null);
  const params = { ...(rank === null ? {} : { rank }), ...(step === null ? {} : { step }) };
  const chosen = useAnswer<Answer>(run, special ? "layers" : null, special ? params : {}, EVERY_MS).value;
  if (usual === null || usual.rank === null) return null;
  const layers = special && chosen !== null && chosen.rank !== null && (rank === null || chosen.rank === rank) ? chosen : usual;
  return <Known run={run} layers={layers} usual={usual} named={named} missing={there ? null : rank} />;
}

interface KnownProps {
  run: OpenRun;
  layers: LayersDocument;
  /** The fullest rank in its last sample. */
  usual: LayersDocument;
  /** The rank whose layer the verdict names. */
  named: number | null;
  /** The selected rank, if it has no samples. */
  missing: number | null;
}

function Known({ run, layers, usual, named, missing }: KnownProps) {
  const table = useSignal(false);
  const timed = layers.modules.some((row) => (row.forward_us ?? 0) > 0 || (row.backward_us ?? 0) > 0);
  const graded = layers.modules.some((row) => row.grad_norm !== null || row.weight_norm !== null);
  return (
    <Card title="Layers" part="layers" class="layers" about={layers.text.shown} tools={<Choices run={run} layers={layers} usual={usual} named={named} />} csv={{ name: `${run.name}-layers-rank-${layers.rank}-step-${layers.step}`, make: () => layersTable(layers) }}>
      {missing !== null && <p class="muted">Rank {missing} has no layer samples; this is rank {layers.rank}.</p>}
      {layers.notes.map((note) => (
        <p key={note} class="layer-note">
          {note}
        </p>
      ))}
      <section>
        <h3>
          Memory by layer{" "}
          <span class="heat-buttons" role="group" aria-label="Memory by layer as">
            <button type="button" aria-pressed={!table.value} onClick={() => (table.value = false)}>
              Map
            </button>
            <button type="button" aria-pressed={table.value} onClick={() => (table.value = true)}>
              Table
            </button>
          </span>
        </h3>
        <p class="muted small">{layers.sentences.join(" ")}</p>
        {table.value ? <LayerTable layers={layers} /> : <MemoryMap layers={layers} />}
        {layers.modules_left_out > 0 && <p class="muted small">The {count(layers.modules_left_out)} smallest of {count(layers.modules_total)} modules are counted in those that contain them.</p>}
      </section>
      {layers.timeline.step.length > 1 && <Timeline run={run} layers={layers} />}
      {timed && <TimeMap layers={layers} />}
      {graded && (
        <section>
          <h3>Gradients by layer</h3>
          <GradientTable layers={layers} />
        </section>
      )}
      {layers.unseen.length > 0 && <p class="muted small">Not seen: {layers.unseen.join("; ")}.</p>}
    </Card>
  );
}

/** The rank and the sample, which are those of the whole page. */
function Choices({ run, layers, usual, named }: Pick<KnownProps, "run" | "layers" | "usual" | "named">) {
  const { ranks } = usual;
  const { steps } = layers;
  return (
    <>
      {ranks.length > 1 && ranks.length <= MOST_CHOICES && (
        <select aria-label="Rank of the layers" value={run.rank.value !== null && ranks.includes(run.rank.value) ? String(run.rank.value) : ""} onChange={({ currentTarget: { value } }) => (run.rank.value = value === "" ? null : Number(value))}>
          <option value="">{named === null ? "fullest rank" : "rank of the verdict"}</option>
          {ranks.map((rank) => (
            <option key={rank} value={String(rank)}>
              rank {rank}
            </option>
          ))}
        </select>
      )}
      {steps.length > 1 && (
        <select aria-label="Sample of the layers" value={run.step.value === null ? "" : String(layers.step)} onChange={({ currentTarget: { value } }) => (run.step.value = value === "" ? null : Number(value))}>
          <option value="">last sample</option>
          {steps.map((step) => (
            <option key={step} value={String(step)}>
              step {count(step)}
            </option>
          ))}
        </select>
      )}
    </>
  );
}

/** Which module fills the picture, by name: another sample has the same modules. */
function useRoot(rows: readonly LayerRow[]): [number, (at: number) => void] {
  const name = useSignal<string | null>(null);
  const found = name.value === null ? -1 : rows.findIndex((row) => row.name === name.value);
  return [Math.max(0, found), (at) => (name.value = rows[at]?.name ?? null)];
}

/** Go one level towards the chosen cell, if there is anything inside. */
function goInside(rows: readonly LayerRow[], path: readonly Cell[], root: number, go: (at: number) => void): void {
  const next = path.map(({ at }) => at).find((at) => at !== root && rows.some(({ parent }) => parent === at));
  if (next !== undefined) go(next);
}

function Crumbs({ rows, root, go, label }: { rows: readonly LayerRow[]; root: number; go: (at: number) => void; label: string }) {
  const path = pathTo(rows, root);
  if (path.length < 2) return null;
  return (
    <nav class="layer-crumbs" aria-label={label}>
      {path.map((at, place) =>
        place === path.length - 1 ? (
          <span key={at} aria-current="true">
            {nameInside(rows[at] as LayerRow, rows[path[place - 1] ?? -1])}
          </span>
        ) : (
          <button key={at} type="button" class="link" onClick={() => go(at)}>
            {nameInside(rows[at] as LayerRow, rows[path[place - 1] ?? -1])}
          </button>
        ),
      )}
    </nav>
  );
}

function MemoryMap({ layers }: { layers: LayersDocument }) {
  const rows = layers.modules;
  const [root, go] = useRoot(rows);
  const kinds = layers.kinds.map(({ kind }) => kind);
  const tip = (cell: Cell): Tip => memoryTip(layers, cell);
  return (
    <>
      <Crumbs rows={rows} root={root} go={go} label="Modules around this map" />
      <CellPicture
        label={`Memory by layer: ${titleOf(rows[root])}, ${rows[root]?.text.total_bytes ?? ""}.`}
        role="treemap"
        height={MAP_PX}
        make={(width) => memoryCells(rows, root, kinds, { x: 0, y: 0, width, height: MAP_PX })}
        deps={[rows, root]}
        tip={tip}
        onEnter={(path) => goInside(rows, path, root, go)}
        onLeave={() => go(Math.max(0, rows[root]?.parent ?? 0))}
      />
      <ul class="legend" aria-label="Kinds of memory">
        {layers.kinds.map(({ kind, title, text }) => (
          <li key={kind}>
            <span class="swatch" style={{ background: `var(${kindProperty(kind)})` }} />
            {title} {text.bytes} ({text.share})
          </li>
        ))}
      </ul>
    </>
  );
}

function memoryTip({ modules: rows, kinds }: LayersDocument, { at, part }: Cell): Tip {
  const row = rows[at] as LayerRow;
  return {
    title: row.name === "" ? row.type : `${row.name} (${row.type})`,
    rows: [
      ...kinds.flatMap(({ kind, title }) => (row.text.bytes[kind] === undefined ? [] : [{ name: title, value: row.text.bytes[kind] as string, color: `var(${kindProperty(kind)})`, strong: kind === part }])),
      { name: "all", value: `${row.text.total_bytes}, ${row.text.share}` },
    ],
  };
}

function Timeline({ run, layers }: { run: OpenRun; layers: LayersDocument }) {
  const whole = extent(useSlowly(run.steps, CALM_MS));
  const { step: steps, total_bytes: totals } = layers.timeline;
  const lines = useMemo(() => timelineLines(layers), [layers]);
  return (
    <section>
      <h3>
        Memory over samples <span class="muted">rank {layers.rank}; a click shows that sample</span>
      </h3>
      <Plot
        label={`Memory of the layers of rank ${layers.rank} over ${count(steps.length)} samples: first ${bytes(totals[0])}, last ${bytes(totals.at(-1))}`}
        height={170}
        {...stepAxis(run, whole)}
        make={() => timelineChart(steps, lines)}
        deps={[steps, lines]}
        format={bytes}
      />
      <ul class="legend" aria-label="Lines of memory over samples">
        {lines.map(({ name, property, dash }) => (
          <li key={name}>
            <span class="line-swatch" style={{ borderTopColor: `var(${property})`, borderTopStyle: dash === undefined ? "solid" : "dashed" }} />
            {name}
          </li>
        ))}
      </ul>
    </section>
  );
}

function TimeMap({ layers }: { layers: LayersDocument }) {
  const rows = layers.modules;
  const [root, go] = useRoot(rows);
  const { forward_us: forward = "–", backward_us: backward = "–" } = rows[root]?.text ?? {};
  return (
    <section>
      <h3>
        Time by layer <span class="muted">on the {layers.clock}; a module is as wide as it takes long, with the modules inside below it</span>
      </h3>
      <Crumbs rows={rows} root={root} go={go} label="Modules around this chart" />
      <CellPicture
        label={`Time by layer: ${titleOf(rows[root])}, forward ${forward}, backward ${backward}.`}
        role="flame chart"
        height={levelsOf(rows, root) * ROW_PX}
        make={(width) => timeCells(rows, root, width)}
        deps={[rows, root]}
        tip={(cell) => timeTip(rows, cell)}
        onEnter={(path) => goInside(rows, path, root, go)}
        onLeave={() => go(Math.max(0, rows[root]?.parent ?? 0))}
      />
      <ul class="legend" aria-label="Passes">
        {(["forward", "backward"] as const).map((pass) => (
          <li key={pass}>
            <span class="swatch" style={{ background: `var(${passProperty(pass)})` }} />
            {pass}
          </li>
        ))}
      </ul>
    </section>
  );
}

function timeTip(rows: readonly LayerRow[], { at, part }: Cell): Tip {
  const row = rows[at] as LayerRow;
  const shown = (["forward", "backward"] as const).filter((pass) => passUs(row, pass) !== null);
  return {
    title: row.name === "" ? row.type : `${row.name} (${row.type})`,
    rows: shown.flatMap((pass) => [
      { name: pass, value: row.text[`${pass}_us`], color: `var(${passProperty(pass)})`, strong: pass === part },
      ...(row.text[`own_${pass}_us`] === row.text[`${pass}_us`] ? [] : [{ name: `${pass}, without the modules inside`, value: row.text[`own_${pass}_us`] }]),
      ...(row[`host_${pass}_us`] == null ? [] : [{ name: `${pass}, time of the host to start it`, value: row.text[`host_${pass}_us`] ?? "" }]),
    ]),
  };
}
