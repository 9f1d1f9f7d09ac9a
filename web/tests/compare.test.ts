import { expect, test, vi } from "vitest";
import type { StepsDocument } from "../src/api/documents";
import { ceiling, curve, letterOf, ownWords, quantileOf } from "../src/run/compare";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { metricRows } = await import("../src/screens/compare-table");
const { overlaysOf } = await import("../src/screens/compare-metrics");

function steps(wall: number[], size = 1): StepsDocument {
  return {
    first: wall.map((_, at) => 10 + at * size),
    last: wall.map((_, at) => 9 + (at + 1) * size),
    steps: wall.map(() => size),
    ranks: wall.map(() => 2),
    quantiles: [0.5],
    ns: { wall: wall.map((value) => [value]) },
    mean_ns: { wall },
    worst: wall.map(() => []),
    start_wall_ns: wall.map(() => 0),
    device_mean_ns: {},
    memory_bytes: {},
  };
}

test("quantiles are interpolated", () => {
  expect([0, 0.25, 0.5, 1].map((share) => quantileOf([4, 1, 3, 2], share))).toEqual([1, 1.75, 2.5, 4]);
});

test("curves by step and by share of the run", () => {
  const run = steps([5, 6, 7, 8], 10);
  expect(curve(run, "step")).toEqual({ x: [10, 20, 30, 40], y: [5, 6, 7, 8] });
  expect(curve(run, "share").x).toEqual([0, 25, 50, 75]);
});

test("a few outliers do not flatten the chart, and are counted", () => {
  expect(ceiling([10, 12])).toEqual({ top: 12 * 1.05, beyond: 0 });
  const values = [1000, ...Array.from({ length: 99 }, () => 10)];
  expect(ceiling(values)).toEqual({ top: 14, beyond: 1 });
  expect(ceiling([])).toEqual({ top: 0, beyond: 0 });
});

test("words missing on the other side are marked", () => {
  const marked = (text: string, other: string | null): string[] => ownWords(text, other).filter((word) => word.own).map((word) => word.text);
  expect(marked("train.py --lr 1 --wd 1", "train.py --lr 1")).toEqual(["--wd", "1"]);
  expect(marked("a b", null)).toEqual(["a", "b"]);
  expect(ownWords("a  b", "a b").map((word) => word.text).join("")).toBe("a  b");
});

test("noted numbers are rows with their last value, whoever has them", () => {
  const noted = (name: string, ...value: number[]) => ({ metrics: [{ name, step: value.map((_, at) => at), value }], left_out: 0 });
  const rows = metricRows([noted("loss", 3, 2), noted("loss", 3, 1.5), null, noted("lr", 0.01)]);
  expect(rows.map(({ name, cells }) => [name, ...cells.map((cell) => cell?.text ?? null)])).toEqual([
    ["loss", "2", "1.5", null, null],
    ["lr", null, null, null, "0.01"],
  ]);
  expect(rows.flatMap((row) => row.cells).every((cell) => cell === null || (cell.change === null && cell.look === null))).toBe(true);
});

test("metrics are laid over each other by name, a loss first, with a line for each run that has it", () => {
  const lr = { name: "lr", step: [0, 1], value: [0.1, 0.2] };
  const loss = (last: number) => ({ name: "train/loss", step: [0, 1], value: [3, last] });
  const overlays = overlaysOf([{ metrics: [lr, loss(2)], left_out: 0 }, null, { metrics: [loss(1), { name: "none", step: [], value: [] }], left_out: 0 }]);
  expect(overlays.map(({ name, lines }) => [name, ...lines.map(({ at, value }) => [at, value.at(-1)])])).toEqual([
    ["train/loss", [0, 2], [2, 1]],
    ["lr", [0, 0.2]],
  ]);
});

test("runs are named by letters", () => {
  expect([0, 1, 7].map(letterOf)).toEqual(["A", "B", "H"]);
});
