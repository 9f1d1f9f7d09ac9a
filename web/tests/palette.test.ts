import { expect, test } from "vitest";
import { ownPhases, phaseProperty } from "../src/charts/palette";

test("own phases of a run differ in colour as long as there are colours, in the order in which it told of them", () => {
  // By a checksum of their names these three had one colour.
  const names = ["🔥 augment 数据", "טעינת נתונים", "a_very_long_phase_name_that_some"];
  ownPhases(["forward", ...names, "other"]);
  expect(names.map(phaseProperty)).toEqual(["--phase-own-0", "--phase-own-1", "--phase-own-2"]);
  expect(["later", "last", ...names].map(phaseProperty)).toEqual(["--phase-own-3", "--phase-own-0", "--phase-own-0", "--phase-own-1", "--phase-own-2"]);
  expect(["forward", "other"].map(phaseProperty)).toEqual(["--phase-forward", "--phase-other"]);
  ownPhases(["last"]);
  expect(phaseProperty("last")).toBe("--phase-own-0");
});
