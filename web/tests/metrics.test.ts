import { expect, test, vi } from "vitest";
import { findingOf } from "./documents-made";
import { stepsOf } from "./steps-sample";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { axisText, lostSince, metricTable, metricWords, numberText, paceOf } = await import("../src/panels/metrics");

test("a metric in words and as a table; small numbers keep their digits", () => {
  const rate = { name: "lr", step: [0, 4], value: [0.0003, 1.25e-7] };
  expect(metricWords(rate)).toBe("lr over 2 points: first 0.0003, last 1.25e-7");
  expect(metricTable([rate]).rows).toEqual([["lr", 0, 0.0003], ["lr", 4, 1.25e-7]]);
  expect([numberText(1234.567), numberText(-45678), numberText(3e12), numberText(Number.NaN)]).toEqual(["1,235", "-45,680", "3000000000000", "–"]);
});

test("a label of an axis is short enough for its margin", () => {
  expect([0, 0.0001, 0.00023, 0.000235, 24, -45678, 1_200_000].map(axisText)).toEqual(["0", "0.0001", "0.00023", "2.35e-4", "24", "-45,680", "1.2e+6"]);
});

test("the pace is from one start to the next", () => {
  const steps = stepsOf([{ first: 0, start: 0 }, { first: 1, start: 5e8 }, { first: 2, start: 1e9 }, { first: 4, start: 3e9 }]);
  expect(paceOf(steps)).toEqual({ name: "steps per second", step: [0, 1, 2], value: [2, 2, 1] });
});

test("a metric that is no number any more", () => {
  const finding = (kind: string, evidence: Record<string, unknown>) => findingOf({ kind, evidence });
  const found = lostSince([finding("loss_nan", { name: "loss", first_step: 60 }), finding("loss_spike", { name: "lr", first_step: 3 }), finding("loss_nan", { layer: "0" })]);
  expect([...found]).toEqual([["loss", 60]]);
});
