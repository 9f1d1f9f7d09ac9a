import { expect, test } from "vitest";
import { ontoSteps, StepClock } from "../src/run/align";
import { wallSpan } from "../src/run/stretch";
import { single, stepsOf } from "./steps-sample";

const T0 = 1e18;

test("steps are interpolated evenly between known times", () => {
  const clock = new StepClock(stepsOf([{ first: 0, last: 9, start: T0 }, { first: 10, last: 19, start: T0 + 100e9, wall: 5e9 }]));
  expect(clock.step(T0)).toBe(0);
  expect(clock.step(T0 + 50e9)).toBe(5);
  expect(clock.step(T0 + 100e9)).toBe(10);
  expect(clock.step(T0 + 125e9)).toBe(15);
  expect(clock.step(T0 + 150e9)).toBe(20);
  expect([clock.step(T0 - 1e9), clock.step(T0 + 151e9)]).toEqual([null, null]);
  expect(clock.wall(5)).toBe(T0 + 50e9);
  expect(clock.span).toEqual([T0, T0 + 150e9]);
});

test("a later time is never an earlier step, even if clocks were set", () => {
  let seed = 3;
  const random = (): number => (seed = (seed * 16_807) % 2_147_483_647) / 2_147_483_647;
  for (let trial = 0; trial < 50; trial += 1) {
    const bins = Array.from({ length: 20 }, (_, at) => ({ first: at * 3, last: at * 3 + 2, start: random() < 0.1 ? 0 : T0 + at * 1e9 + (random() - 0.5) * 4e9, wall: 3e8 }));
    const clock = new StepClock(stepsOf(bins));
    let before = -1;
    for (let at = -3; at < 25; at += 0.25) {
      const step = clock.step(T0 + at * 1e9);
      if (step === null) continue;
      expect(step).toBeGreaterThanOrEqual(before);
      before = step;
    }
  }
});

test("without steps there is no mapping", () => {
  const clock = new StepClock(stepsOf([]));
  expect([clock.step(T0), clock.wall(0), clock.span]).toEqual([null, null, null]);
});

test("samples are aligned with their steps, and those outside are counted", () => {
  const clock = new StepClock(stepsOf([{ first: 0, start: T0, wall: 1e9 }, { first: 1, start: T0 + 1e9, wall: 1e9 }]));
  const found = ontoSteps(clock, [T0 - 5e9, T0 + 0.5e9, T0 + 1.5e9, T0 + 9e9], [[1, 2, 3, 4]]);
  expect(found).toEqual({ x: [0, 1], columns: [[2, 3]], outside: 2 });
  // Bins without any value are neither over a step nor outside.
  const few = ontoSteps(clock, [T0 - 5e9, T0 + 0.5e9, T0 + 1.5e9, T0 + 9e9], [[null, null, 3, null], [null, null, null, 7]]);
  expect(few).toEqual({ x: [1], columns: [[3], [null]], outside: 1 });
});

test("neighboring windows request the same time range", () => {
  const steps = single(1000);
  const clock = new StepClock(steps);
  const whole = { first: 0, last: 999 };
  expect(wallSpan(null, whole, clock)).toEqual({});
  const one = wallSpan({ first: 130, last: 229 }, whole, clock);
  expect(one).toEqual(wallSpan({ first: 133, last: 231 }, whole, clock));
  expect(one).toEqual({ first_ns: "1000000128000000000", last_ns: "1000000241000000000" });
  expect(wallSpan({ first: 900, last: 999 }, whole, clock).last_ns).toBeUndefined();
});
