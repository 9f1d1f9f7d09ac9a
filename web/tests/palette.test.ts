import { expect, test } from "vitest";
import { ownPhases, phaseProperty } from "../src/charts/palette";

test("user-defined phases get different colors, in their reported order, while there are enough", () => {
  // With colors from a checksum of the names, these three would have been equal.
  const names = ["🔥 augment 数据", "טעינת נתונים", "a_very_long_phase_name_that_some"];
  ownPhases(["forward", ...names, "other"]);
  expect(names.map(phaseProperty)).toEqual(["--phase-own-0", "--phase-own-1", "--phase-own-2"]);
  expect(["later", "last", ...names].map(phaseProperty)).toEqual(["--phase-own-3", "--phase-own-0", "--phase-own-0", "--phase-own-1", "--phase-own-2"]);
  expect(["forward", "other"].map(phaseProperty)).toEqual(["--phase-forward", "--phase-other"]);
  ownPhases(["last"]);
  expect(phaseProperty("last")).toBe("--phase-own-0");
});
