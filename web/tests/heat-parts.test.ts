import { expect, test } from "vitest";
import { colored, robustRange, shades, shareOf, steadied, SHADES } from "../src/charts/color-scale";
import { appended, cellOf, cellsWithin, grouped, openFrom, pieceOf, stretches } from "../src/charts/heat-piece";
import { paramsOf, questionFor, serves, shapeOf } from "../src/charts/heat-request";
import { held, moved, pointAt, rested, showing, ticks, xOf, yOf, zoomed, type HeatWindow } from "../src/charts/heat-window";
import { cellWords, grainWords, placeWords } from "../src/charts/heat-words";
import { heatOf, piece } from "./heat-made";

const LIGHT = ["#f8f5c6", "#bed990", "#5dbf97", "#1d97a3", "#136aa5", "#2e3b8f", "#2c1262"];
const DARK = ["#241a54", "#2c3886", "#09659f", "#0f919c", "#3bbb8d", "#9fd959", "#fbed50"];

const value = (rank: number, step: number): number => 1e6 * (rank + 1) + step;

/** Relative luminance, as used for contrast. */
function luminance(pixel: number): number {
  const [red, green, blue] = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255].map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

test.each([
  ["light", LIGHT, -1],
  ["dark", DARK, 1],
])("the colors of the %s theme are monotonic in lightness and include their stops", (_theme, stops, sign) => {
  const colors = shades(stops);
  expect(colors.length).toBe(SHADES);
  // Rounding to whole channels may swap two adjacent shades.
  for (let at = 4; at < SHADES; at += 1) expect(sign * (luminance(colors[at] ?? 0) - luminance(colors[at - 4] ?? 0))).toBeGreaterThan(0);
  const hex = (pixel: number): string => `#${[pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255].map((part) => part.toString(16).padStart(2, "0")).join("")}`;
  expect([hex(colors[0] ?? 0), hex(colors[SHADES - 1] ?? 0)]).toEqual([stops[0], stops.at(-1)]);
});

test("a few outliers do not reduce everything else to one color", () => {
  const cells = Float32Array.from({ length: 10_000 }, (_none, at) => (at % 2000 === 7 ? 60e9 : 40e6 + (at % 100) * 1e6));
  const range = robustRange(cells);
  expect(range?.most).toBe(Math.fround(60e9));
  expect(range?.high).toBeLessThan(150e6);
  expect(range?.low).toBeGreaterThan(35e6);
});

test("steps that are long on every rank do not stretch the colors, but one slow rank does", () => {
  const columns = 100;
  const [warm, stalled] = [0, 40];
  const cells = Float32Array.from({ length: 8 * columns }, (_none, at) => {
    const [rank, step] = [Math.floor(at / columns), at % columns];
    return (step === warm ? 900 : step === stalled || step === 70 ? 400 : 40) + (rank === 5 ? 15 : 0);
  });
  const range = robustRange(cells, columns);
  expect([range?.most, range?.high]).toEqual([915, 55]);
  expect(robustRange(cells)?.high).toBeGreaterThan(400);
});

test("noise around one value does not look like a problem, and unknown cells are ignored", () => {
  const cells = Float32Array.from({ length: 1000 }, (_none, at) => (at % 3 === 0 ? Number.NaN : 100 + (at % 2)));
  const range = robustRange(cells);
  expect(range).not.toBeNull();
  if (range === null) return;
  expect(range.high - range.low).toBeGreaterThanOrEqual(15);
  expect([range.least, range.most]).toEqual([100, 101]);
  expect(robustRange(new Float32Array(5).fill(Number.NaN))).toBeNull();
  expect(robustRange(new Float32Array(0))).toBeNull();
  expect(robustRange(new Float32Array(4))?.high).toBeGreaterThan(0);
});

test("the range stays if the new one is similar", () => {
  const before = { low: 10, high: 110, least: 0, most: 200 };
  expect(steadied(before, { low: 12, high: 115, least: 1, most: 300 })).toEqual({ low: 10, high: 110, least: 1, most: 300 });
  expect(steadied(before, { low: 10, high: 150, least: 1, most: 300 })?.high).toBe(150);
  expect(steadied(null, before)).toBe(before);
});

test("each value gets the color of its share; values beyond the range get the color of the end", () => {
  const range = { low: 10, high: 20, least: 0, most: 100 };
  const colors = Uint32Array.from({ length: SHADES }, (_none, at) => at);
  const pixels = new Uint32Array(5).fill(99);
  colored(Float32Array.of(0, 10, 15, 1000, Number.NaN), range, colors, pixels);
  expect([...pixels]).toEqual([0, 0, 128, 255, 0]);
  expect([shareOf(5, range), shareOf(15, range), shareOf(25, range), shareOf(Number.NaN, range)]).toEqual([0, 0.5, 1, Number.NaN]);
});

const ALL: HeatWindow = { step0: 0, step1: 1000, rank0: 0, rank1: 64 };
const BOX = { left: 70, top: 4, width: 500, height: 320 };

test("a screen position maps to the cell drawn there", () => {
  const window = { step0: 100, step1: 200, rank0: 8, rank1: 16 };
  for (const at of [
    { step: 100, rank: 8 },
    { step: 157, rank: 11 },
    { step: 199, rank: 15 },
  ]) {
    const [x, y] = [xOf(window, BOX, at.step + 0.5), yOf(window, BOX, at.rank + 0.5)];
    expect(pointAt(window, BOX, x, y)).toEqual(at);
  }
  expect(pointAt(window, BOX, 69.9, 100)).toBeNull();
  expect(pointAt(window, BOX, 100, 324)).toBeNull();
});

test("windows always stay inside the whole range", () => {
  let seed = 7;
  const random = (): number => {
    seed = (seed * 1103515245 + 12345) & 0x7fffffff;
    return seed / 0x7fffffff;
  };
  let window = ALL;
  for (let turn = 0; turn < 800; turn += 1) {
    const at = { step: random() * 1200 - 100, rank: random() * 80 - 8 };
    const next = [
      () => zoomed(window, ALL, at, { steps: 0.2 + random() * 3, ranks: 0.2 + random() * 3 }),
      () => moved(window, ALL, random() * 400 - 200, random() * 20 - 10),
      () => held({ step0: at.step, step1: at.step + random() * 50, rank0: at.rank, rank1: at.rank + random() * 3 }, ALL),
      () => showing(window, ALL, { step: Math.floor(random() * 1000), rank: Math.floor(random() * 64) }),
      () => rested(window, ALL),
    ][turn % 5];
    window = next?.() ?? window;
    expect(window.step0).toBeGreaterThanOrEqual(-1e-9);
    expect(window.step1).toBeLessThanOrEqual(1000 + 1e-9);
    expect(window.rank0).toBeGreaterThanOrEqual(-1e-9);
    expect(window.rank1).toBeLessThanOrEqual(64 + 1e-9);
    expect(window.step1 - window.step0).toBeGreaterThanOrEqual(4 - 1e-9);
    expect(window.rank1 - window.rank0).toBeGreaterThanOrEqual(1 - 1e-9);
  }
});

test("zooming keeps the point in place, and zooming back restores the window", () => {
  const at = { step: 400, rank: 20 };
  const near = zoomed(ALL, ALL, at, { steps: 0.5, ranks: 0.5 });
  expect(xOf(near, BOX, at.step)).toBeCloseTo(xOf(ALL, BOX, at.step));
  expect(yOf(near, BOX, at.rank)).toBeCloseTo(yOf(ALL, BOX, at.rank));
  expect(zoomed(near, ALL, at, { steps: 2, ranks: 2 })).toEqual(ALL);
});

test("axes have round integers", () => {
  expect(ticks(0, 1000, 5)).toEqual([0, 200, 400, 600, 800]);
  expect(ticks(3, 7, 20)).toEqual([3, 4, 5, 6]);
  expect(ticks(0.5, 4, 100)).toEqual([1, 2, 3]);
});

test("requests ask for no more cells than pixels, nor more than the hub returns", () => {
  const all = { step0: 0, step1: 10_000, rank0: 0, rank1: 10_000 };
  for (const pixels of [
    { width: 1300, height: 380 },
    { width: 5000, height: 3000 },
    { width: 300, height: 20 },
  ]) {
    for (const window of [all, { step0: 1234, step1: 2345, rank0: 77, rank1: 911 }, { step0: 9990, step1: 10_000, rank0: 9999, rank1: 10_000 }]) {
      const asked = questionFor(window, all, pixels);
      const { rows, columns } = shapeOf(asked);
      expect(rows * columns).toBeLessThanOrEqual(1 << 20);
      expect([rows <= 2048, columns <= 4096]).toEqual([true, true]);
      expect(asked.window.step0).toBeLessThanOrEqual(window.step0);
      expect(asked.window.step1).toBeGreaterThanOrEqual(window.step1);
      expect(asked.window.step0 % asked.stepSpan).toBe(0);
      expect(asked.window.step1).toBeLessThanOrEqual(all.step1);
      const params = paramsOf(asked, "work", "max");
      expect(params["ranks"]).toBe(`${asked.window.rank0}-${asked.window.rank1 - 1}`);
    }
  }
});

test("a piece serves windows inside it until finer cells are needed or cells are narrower than a pixel", () => {
  const pixels = { width: 500, height: 64 };
  const whole = piece(ALL, 1, 2, value);
  expect(serves(whole, ALL, pixels)).toBe(true);
  expect(serves(whole, { ...ALL, step0: 100, step1: 300 }, pixels)).toBe(false);
  expect(serves(whole, ALL, { width: 499, height: 64 })).toBe(false);
  expect(serves(whole, { ...ALL, step1: 1001 }, pixels)).toBe(false);
});

test("cells are found by rank and step", () => {
  const found = piece({ step0: 10, step1: 31, rank0: 4, rank1: 9 }, 2, 10, value);
  expect(cellOf(found, 6, 29)).toEqual({ row: 1, column: 1, firstRank: 6, lastRank: 7, firstStep: 20, lastStep: 29, value: value(7, 29) });
  expect(cellOf(found, 8, 30)?.value).toBe(value(8, 30));
  expect([cellOf(found, 9, 20), cellOf(found, 4, 31), cellOf(found, 3, 20)]).toEqual([null, null, null]);
  expect(cellsWithin(found, { step0: 20, step1: 30, rank0: 4, rank1: 6 })).toEqual([Float32Array.of(value(5, 29)), 1]);
});

test("adjacent cells of equal width are drawn at once", () => {
  const { heat } = piece({ step0: 0, step1: 25, rank0: 0, rank1: 2 }, 1, 10, value);
  expect(stretches(heat.firstSteps, heat.lastSteps)).toEqual([
    { from: 0, to: 2, start: 0, end: 20 },
    { from: 2, to: 3, start: 20, end: 25 },
  ]);
  expect(stretches(Uint32Array.of(0, 1, 5), Uint32Array.of(0, 1, 5))).toHaveLength(2);
});

test("if every fourth step is kept, each covers the steps up to the next", () => {
  const heat = { ...heatOf({ step0: 0, step1: 4, rank0: 0, rank1: 1 }, 1, 1, value), firstSteps: Uint32Array.of(0, 4, 8, 16), lastSteps: Uint32Array.of(0, 4, 8, 16) };
  const found = pieceOf(heat, "max", { window: ALL, stepSpan: 1, rankSpan: 1 });
  expect([...(found?.heat.lastSteps ?? [])]).toEqual([3, 7, 8, 16]);
});

test("a value that is known for some steps only is held until the next", () => {
  const heat = { ...heatOf({ step0: 0, step1: 6, rank0: 0, rank1: 2 }, 1, 1, (rank, step) => (step % 3 === 1 ? rank * 10 + step : Number.NaN)), held: true };
  const found = pieceOf(heat, "max", { window: ALL, stepSpan: 1, rankSpan: 1 });
  expect([...(found?.heat.cells ?? [])]).toEqual([Number.NaN, 1, 1, 1, 4, 4, Number.NaN, 11, 11, 11, 14, 14]);
});

test.each([1, 3, 10])("appended data equals data requested at once (columns of %i steps)", (span) => {
  const ranks = { rank0: 0, rank1: 5 };
  let known = piece({ step0: 0, step1: 30, ...ranks }, 2, span, value);
  for (let end = 31; end < 200; end += 1 + (end % 7)) {
    const from = openFrom(known);
    expect(from % span).toBe(0);
    const longer = appended(known, heatOf({ step0: from, step1: end, ...ranks }, 2, 1, value));
    expect(longer).not.toBeNull();
    if (longer === null) return;
    known = longer;
    const whole = piece({ step0: 0, step1: end, ...ranks }, 2, span, value);
    expect([...known.heat.cells]).toEqual([...whole.heat.cells]);
    expect([...known.heat.firstSteps]).toEqual([...whole.heat.firstSteps]);
    expect([...known.heat.lastSteps]).toEqual([...whole.heat.lastSteps]);
    expect(known.window).toEqual(whole.window);
  }
});

test("late ranks are requested again; other ranks or a gap require a full request", () => {
  const ranks = { rank0: 0, rank1: 3 };
  const known = piece({ step0: 0, step1: 100, ...ranks }, 1, 1, (rank, step) => (rank === 2 && step >= 70 ? Number.NaN : value(rank, step)));
  expect(openFrom(known)).toBe(70);
  expect(openFrom(piece({ step0: 0, step1: 100, ...ranks }, 1, 1, value))).toBe(92);
  expect(appended(known, heatOf({ step0: 92, step1: 101, rank0: 0, rank1: 4 }, 1, 1, value))).toBeNull();
  expect(appended(known, heatOf({ step0: 105, step1: 110, ...ranks }, 1, 1, value))).toBeNull();
  const late = appended(known, heatOf({ step0: 70, step1: 101, ...ranks }, 1, 1, value));
  expect(late && cellOf(late, 2, 70)?.value).toBe(value(2, 70));
});

test("means of merged steps ignore unknown values", () => {
  const heat = heatOf({ step0: 0, step1: 4, rank0: 0, rank1: 1 }, 1, 1, (_rank, step) => [1, Number.NaN, 5, 7][step] ?? 0);
  expect([...grouped(heat, 2, "mean").cells]).toEqual([1, 6]);
  expect([...grouped(heat, 2, "max").cells]).toEqual([1, 7]);
});

test("the text of a cell depends on its aggregation", () => {
  const one = piece({ step0: 0, step1: 4, rank0: 0, rank1: 2 }, 1, 1, () => 61.2e6);
  const many = piece({ step0: 0, step1: 40, rank0: 0, rank1: 20 }, 10, 20, () => 61.2e6);
  const cell = cellOf(one, 1, 3);
  const wide = cellOf(many, 1, 3);
  if (cell === null || wide === null) throw new Error("no cell");
  expect([placeWords(cell), cellWords(cell, one), grainWords(one)]).toEqual(["rank 1, step 3", "61.2 ms", "each cell is one step of one rank"]);
  expect([placeWords(wide), cellWords(wide, many)]).toEqual(["ranks 0–9, steps 0–19", "at most 61.2 ms"]);
  expect(grainWords({ ...many, heat: { ...many.heat, exact: false } })).toBe("each cell is the highest of 10 ranks, each the mean of 20 steps");
  expect(cellWords({ ...cell, value: Number.NaN }, one)).toBe("not known");
});
