import { expect, test, vi } from "vitest";
import { findingOf } from "./documents-made";
import type { LayerRow, LayersDocument } from "../src/api/layer-documents";
import { cellAt, labelsOf, neighbor, type Cell } from "../src/charts/cells";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { childrenOf, levelsOf, memoryCells, nameInside, pathTo, ROW_PX, timeCells } = await import("../src/panels/layer-cells");
const { byHealth, layersTable, rankOfVerdict, timelineLines, trained } = await import("../src/panels/layer-figures");

const BOX = { x: 0, y: 0, width: 400, height: 100 };

function row(name: string, parent: number, own: Record<string, number>, more: Partial<LayerRow> = {}): LayerRow {
  return {
    name,
    type: name === "" ? "Net" : "Linear",
    parent,
    elements: 1,
    left_out: 0,
    own_bytes: own,
    bytes: { ...own },
    total_bytes: 0,
    share: 0,
    forward_us: null,
    own_forward_us: null,
    backward_us: null,
    own_backward_us: null,
    grad_norm: null,
    weight_norm: null,
    update_ratio: null,
    zero_share: null,
    text: { total_bytes: "", share: "", bytes: {}, forward_us: "6 µs", own_forward_us: "", backward_us: "2 µs", own_backward_us: "", grad_norm: "", weight_norm: "", update_ratio: "", zero_share: "" },
    ...more,
  };
}

/** The model holds 10 itself; `layers` has two equal blocks, and the second was called longer. */
function rowsOf(): LayerRow[] {
  const rows = [
    row("", -1, { buffers: 10 }, { forward_us: 6, backward_us: 2 }),
    row("embed", 0, { parameters: 30 }, { forward_us: 1, backward_us: 0 }),
    row("layers", 0, {}, { forward_us: 4, backward_us: 2 }),
    row("layers.0", 2, { parameters: 20, optimizer: 10 }, { forward_us: 1, backward_us: 1, grad_norm: 2 }),
    row("layers.1", 2, { parameters: 20, optimizer: 10 }, { forward_us: 3, backward_us: 1, grad_norm: "nan" }),
  ];
  for (const one of [...rows].reverse()) {
    one.total_bytes = Object.values(one.bytes).reduce((sum, size) => sum + size, 0);
    const outer = rows[one.parent];
    if (outer !== undefined) for (const [kind, size] of Object.entries(one.bytes)) outer.bytes[kind] = (outer.bytes[kind] ?? 0) + size;
  }
  return rows;
}

const KINDS = ["parameters", "optimizer", "buffers"];
const area = ({ box }: Cell): number => box.width * box.height;

test("the map has every byte once, by module and kind", () => {
  const rows = rowsOf();
  const cells = memoryCells(rows, 0, KINDS, BOX);
  const fills = cells.filter(({ property }) => property !== null);
  expect(fills.map(({ at, part }) => [rows[at]?.name, part])).toEqual([
    ["embed", "parameters"],
    ["layers.0", "parameters"],
    ["layers.0", "optimizer"],
    ["layers.1", "parameters"],
    ["layers.1", "optimizer"],
    ["", "buffers"],
  ]);
  for (const cell of fills) expect(area(cell)).toBeCloseTo(((rows[cell.at]?.own_bytes[cell.part] ?? 0) / 100) * 40_000, 6);
  for (const cell of cells) expect(area(cell)).toBeCloseTo(((cell.part === "" ? (rows[cell.at]?.total_bytes ?? 0) : (rows[cell.at]?.own_bytes[cell.part] ?? 0)) / 100) * 40_000, 6);
  // The list has no label of its own: the names of its blocks contain it.
  expect(cells.filter(({ name }) => name !== "").map(({ name }) => name)).toEqual(["embed", "layers.0", "layers.1"]);
});

test("the map of one module", () => {
  const rows = rowsOf();
  const cells = memoryCells(rows, 2, KINDS, BOX);
  expect(cells.map(({ at }) => rows[at]?.name)).toEqual(["layers", "layers.0", "layers.0", "layers.0", "layers.1", "layers.1", "layers.1"]);
  expect(cells[0]?.box).toEqual(BOX);
  expect(cells[1]?.name).toBe("0");
});

test("the icicle: as wide as it takes long, passes side by side", () => {
  const rows = rowsOf();
  const cells = timeCells(rows, 0, 800);
  expect(cells.map(({ name, part, box }) => [name, part, box.x, box.width, box.y / ROW_PX])).toEqual([
    ["forward: Net 6 µs", "forward", 0, 600, 0],
    ["embed", "forward", 0, 100, 1],
    ["layers", "forward", 100, 400, 1],
    ["0", "forward", 100, 100, 2],
    ["1", "forward", 200, 300, 2],
    ["backward: Net 2 µs", "backward", 600, 200, 0],
    ["layers", "backward", 600, 200, 1],
    ["0", "backward", 600, 100, 2],
    ["1", "backward", 700, 100, 2],
  ]);
  expect(levelsOf(rows, 0)).toBe(3);
  expect(levelsOf(rows, 3)).toBe(1);
});

test("children that took longer than their parent stay inside it", () => {
  const rows = rowsOf();
  (rows[2] as LayerRow).forward_us = 2;
  const inside = timeCells(rows, 2, 400).filter(({ part, level }) => part === "forward" && level === 1);
  expect(inside.map(({ box }) => [box.x, box.width])).toEqual([
    [0, 50],
    [50, 150],
  ]);
  expect(timeCells(rows.map((one) => ({ ...one, forward_us: null, backward_us: null })), 0, 400)).toEqual([]);
});

test("paths and names", () => {
  const rows = rowsOf();
  expect(childrenOf(rows)).toEqual([[1, 2], [], [3, 4], [], []]);
  expect(pathTo(rows, 4)).toEqual([0, 2, 4]);
  expect(nameInside(rows[3] as LayerRow, rows[2])).toBe("0");
  expect(nameInside(rows[3] as LayerRow, rows[0])).toBe("layers.0");
});

test("keys and the pointer find cells", () => {
  const cells = memoryCells(rowsOf(), 0, KINDS, BOX);
  const named = (at: number): string => `${cells[at]?.name}/${cells[at]?.part}`;
  const last = cells.at(-1) as Cell;
  expect(cellAt(cells, last.box.x + 1, last.box.y + 1)).toBe(cells.length - 1);
  expect(cellAt(cells, -1, 0)).toBe(-1);
  expect(neighbor(cells, -1, "ArrowDown")).toBe(0);
  const list = neighbor(cells, 0, "ArrowDown");
  expect(cells[list]?.at).toBe(2);
  const first = neighbor(cells, list, "ArrowDown");
  expect(named(first)).toBe("layers.0/");
  expect(named(neighbor(cells, first, "ArrowRight"))).toBe("layers.1/");
  expect(neighbor(cells, first, "ArrowLeft")).toBe(first);
  expect(neighbor(cells, first, "ArrowUp")).toBe(list);
  expect(neighbor(cells, 0, "ArrowUp")).toBe(0);
  expect(neighbor([], -1, "ArrowUp")).toBe(-1);
});

test("labels fit their cells and do not cover each other", () => {
  const cell = (x: number, width: number, name: string, level: number): Cell => ({ parent: -1, box: { x, y: 0, width, height: 20 }, property: null, name, level, at: 0, part: "" });
  expect(labelsOf([cell(0, 200, "layers.0", 1), cell(0, 90, "attention", 2), cell(100, 100, "feedforward", 2), cell(300, 12, "norm", 1)]).map(({ text }) => text)).toEqual(["layers.0", "feedforward"]);
  expect(labelsOf([cell(0, 60, "attention", 1), cell(80, 35, "attention", 1)]).map(({ text }) => text)).toEqual(["attenti…"]);
  // Below the name of the outer cell, if there is room.
  const tall = (one: Cell): Cell => ({ ...one, box: { ...one.box, height: 40 } });
  expect(labelsOf([tall(cell(0, 200, "mlp", 1)), tall(cell(0, 90, "up", 2))]).map(({ text, y }) => [text, y])).toEqual([
    ["mlp", 12],
    ["up", 26],
  ]);
});

test("gradients that are not finite are the highest", () => {
  const rows = trained(rowsOf());
  expect(rows.map(({ name }) => name)).toEqual(["layers.0", "layers.1"]);
  expect(byHealth(rows, "grad_norm", false).map(({ name }) => name)).toEqual(["layers.1", "layers.0"]);
  expect(byHealth(rows, "grad_norm", true).map(({ name }) => name)).toEqual(["layers.0", "layers.1"]);
  expect(byHealth(rows, null, true).map(({ name }) => name)).toEqual(["layers.0", "layers.1"]);
});

test("the table and the lines over samples", () => {
  const layers = {
    modules: rowsOf(),
    kinds: KINDS.map((kind) => ({ kind, title: kind, bytes: 0, share: 0, text: { bytes: "", share: "", min: "", median: "", max: "" } })),
    timeline: { step: [0, 100], bytes: { parameters: [70, 70], optimizer: [0, 20], buffers: [10, 10] }, total_bytes: [80, 100], device_bytes: [null, null], device_peak: [null, 120], peak_bytes: [null, 110], peak_phase: [null, "backward"] },
  } as unknown as LayersDocument;
  expect(layersTable(layers).columns.slice(0, 7)).toEqual(["module", "type", "parameters", "parameters_bytes", "optimizer_bytes", "buffers_bytes", "total_bytes"]);
  expect(layersTable(layers).rows[2]?.slice(0, 8)).toEqual(["layers", "Linear", 1, 40, 20, 0, 60, 4]);
  expect(timelineLines(layers).map(({ name, values }) => [name, values.at(-1)])).toEqual([
    ["parameters", 70],
    ["optimizer", 20],
    ["buffers", 10],
    ["sum", 100],
    ["step peak", 110],
    ["device peak so far", 120],
  ]);
});

test("the layers shown first are those of the rank that the verdict names", () => {
  const found = findingOf({ evidence: { layer: "0" }, ranks: [1], phase: "forward" });
  expect(rankOfVerdict([found], [0, 1])).toBe(1);
  expect(rankOfVerdict([found], [0])).toBeNull();
  expect(rankOfVerdict([{ ...found, evidence: {} }], [0, 1])).toBeNull();
  expect(rankOfVerdict([], [0, 1])).toBeNull();
});
