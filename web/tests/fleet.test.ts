import { expect, test } from "vitest";
import { fleetLink, readRoute, writeRoute } from "../src/address";
import type { CauseRow } from "../src/api/fleet-documents";
import { barParts, behindLink, behindText, hoursText, sumOf } from "../src/run/fleet-bars";
import { readView } from "../src/run/list-rows";

const cause = (name: string): CauseRow => ({ cause: name, name: name.replace("_", " "), gpu_hours: 1, share: 0.1, run_count: 0, runs: [] });
const CAUSES = ["useful", "slow_rank", "input", "unknown"].map(cause);

test("the parts of a bar are the causes in their order, without empty ones and unknown words", () => {
  const hours = { input: 2, useful: 90, slow_rank: 8, unknown: 0, constructor: 5 };
  expect(barParts(CAUSES, hours, true).map((part) => [part.name, part.hours])).toEqual([["useful", 90], ["slow rank", 8], ["input", 2]]);
  expect(barParts(CAUSES, hours, false).map((part) => part.cause)).toEqual(["slow_rank", "input"]);
  expect(sumOf(barParts(CAUSES, hours, false))).toBe(10);
  expect(barParts(CAUSES, {}, true)).toEqual([]);
  expect(barParts(CAUSES, { input: -3 }, true)).toEqual([]);
});

test("hours as text", () => {
  expect([0, 0.01, 0.5, 12.34, 99.96, 1234.5, -3.25, null].map(hoursText)).toEqual(["0", "<0.1", "0.5", "12.3", "100", "1,235", "-3.3", "–"]);
});

test("a bar leads to its runs, one run to itself, and archived ones nowhere", () => {
  expect(behindLink({ runs: ["night~1"], run_count: 1 }, "x")).toBe("#/run/night~1");
  expect(behindLink({ runs: ["s3://bucket/a"], run_count: 1 }, "x")).toBeNull();
  expect(behindLink({ runs: [], run_count: 0 }, "x")).toBeNull();
  const link = behindLink({ runs: ["a&b", "c,d", "s3://bucket/a"], run_count: 9 }, "waiting <for> input") ?? "";
  const found = readRoute(link);
  expect(found.screen).toBe("list");
  expect(readView(found.query ?? "")).toMatchObject({ runs: ["a&b", "c,d"], about: "waiting <for> input", search: "" });
});

test("how many of the runs a link shows", () => {
  expect(behindText({ runs: ["a"], run_count: 1 })).toBe("1 run");
  expect(behindText({ runs: ["a", "b"], run_count: 2 })).toBe("2 runs");
  expect(behindText({ runs: ["a", "b"], run_count: 1510 })).toBe("2 of 1,510 runs");
  expect(behindText({ runs: [], run_count: 7 })).toBe("7 runs");
});

test("the address of the fleet", () => {
  expect(fleetLink()).toBe("#/fleet");
  expect(readRoute("#/fleet?days=30")).toMatchObject({ screen: "fleet", days: 30 });
  expect(writeRoute(readRoute("#/fleet?days=30"))).toBe("#/fleet?days=30");
  expect(readRoute("#/fleet?days=-1")).toMatchObject({ screen: "fleet", days: null });
  expect(readRoute("#/fleet/x").screen).toBe("list");
});
