import { expect, test } from "vitest";
import { corrected, devicePhases, joined } from "../src/run/steps";
import { single, stepsOf } from "./steps-sample";

test("new steps are appended and replace overlapping ones", () => {
  const known = joined(single(4), stepsOf([{ first: 3, forward: 50 }, { first: 4 }]));
  expect(known.first).toEqual([0, 1, 2, 3, 4]);
  expect(known.mean_ns["forward"]).toEqual([30, 30, 30, 50, 30]);
});

test("a corrected step replaces the old one; steps inside longer bins stay", () => {
  const known = stepsOf([{ first: 0, last: 3 }, { first: 4 }, { first: 5 }, { first: 6 }]);
  const again = stepsOf([0, 5, 9].map((first) => ({ first, forward: 50, comm: 20, rank: 1, memory: 7 })));
  again.mean_ns["eval"] = [1, 2, 3];
  const found = corrected(known, again);
  expect(found.first).toEqual(known.first);
  expect(found.mean_ns).toEqual({ wall: [40, 40, 70, 40], work: [30, 30, 50, 30], forward: [30, 30, 50, 30], comm: [10, 10, 20, 10], eval: [0, 0, 2, 0] });
  expect(found.ns["wall"]?.[2]).toEqual([68, 70, 72]);
  expect(found.worst.map((worst) => worst[0]?.rank)).toEqual([2, 2, 1, 2]);
  expect(found.memory_bytes["allocated"]).toEqual([null, null, 7, null]);
});

test("device times arrive with the timed steps, possibly late", () => {
  const known = joined(single(2), stepsOf([{ first: 2, device: 7 }, { first: 3, device: null }]));
  expect(known.device_mean_ns).toEqual({ forward: [null, null, 7, null] });
  expect(devicePhases(known)).toEqual(["forward"]);
  const again = corrected(known, stepsOf([{ first: 1, device: 5 }]));
  expect(again.device_mean_ns).toEqual({ forward: [null, 5, 7, null] });
  expect(joined(single(2), single(3)).device_mean_ns).toEqual({});
  expect(devicePhases(single(3))).toEqual([]);
});
