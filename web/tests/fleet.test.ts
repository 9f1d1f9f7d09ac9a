import { expect, test } from "vitest";
import { fleetLink, readRoute, writeRoute } from "../src/address";
import type { CauseRow } from "../src/api/fleet-documents";
import { barParts, behindLink, behindText, dayText, periodText, sumOf, tenths } from "../src/run/fleet-bars";
import { readView } from "../src/run/list-rows";
import { confidenceText, hoursText, percent } from "../src/ui/format";
import NUMBERS from "../../tests/records/fleet_numbers.json";

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

test("hours, shares and confidences have exactly the text that Python gives them", () => {
  const texts = (rows: (string | number | null)[][], text: (value: number | null) => string): unknown => rows.map(([value]) => [value, text(value as number | null)]);
  expect(texts(NUMBERS.hours, hoursText)).toEqual(NUMBERS.hours);
  expect(texts(NUMBERS.shares, percent)).toEqual(NUMBERS.shares);
  expect(texts(NUMBERS.confidences, confidenceText)).toEqual(NUMBERS.confidences);
  expect([null, 1.25, 1234.56].map(tenths)).toEqual(["–", "1.3", "1,234.6"]);
});

test("days and bars are named in UTC", () => {
  const begin = Date.UTC(2026, 0, 31, 23, 30) * 1e6;
  expect([dayText(begin), dayText(null)]).toEqual(["31 Jan 2026", "–"]);
  expect((["day", "week", "month", "year", "decade"] as const).map((unit) => periodText(begin, unit))).toEqual(["31 Jan 2026", "week of 31 Jan 2026", "Jan 2026", "2026", "2026s"]);
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
