import { expect, test, vi } from "vitest";
import { moved, newest, resized, unlessAll, zoomed } from "../src/charts/window";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { begun, dragged, keyed } = await import("../src/charts/overview");

const whole = { first: 0, last: 999 };

test("a window moves, stops at the ends and keeps its length", () => {
  expect(moved({ first: 10, last: 19 }, 5, whole)).toEqual({ first: 15, last: 24 });
  expect(moved({ first: 10, last: 19 }, -50, whole)).toEqual({ first: 0, last: 9 });
  expect(moved({ first: 10, last: 19 }, 5000, whole)).toEqual({ first: 990, last: 999 });
});

test("zooming keeps the middle, or the newest step", () => {
  expect(zoomed({ first: 100, last: 199 }, 0.5, whole)).toEqual({ first: 125, last: 174 });
  expect(zoomed({ first: 900, last: 999 }, 0.5, whole)).toEqual({ first: 950, last: 999 });
  expect(zoomed({ first: 5, last: 5 }, 0.5, whole)).toEqual({ first: 5, last: 5 });
  expect(zoomed({ first: 5, last: 5 }, 2, whole)).toEqual({ first: 5, last: 6 });
  expect(zoomed(whole, 2, whole)).toEqual(whole);
});

test("edges may cross; the whole run is not a window", () => {
  expect(resized({ first: 100, last: 199 }, "first", 250, whole)).toEqual({ first: 199, last: 250 });
  expect(resized({ first: 100, last: 199 }, "last", 5000, whole)).toEqual({ first: 100, last: 999 });
  expect(newest(200, whole)).toEqual({ first: 800, last: 999 });
  expect(newest(2000, whole)).toEqual(whole);
  expect(unlessAll(whole, whole)).toBeNull();
  expect(unlessAll({ first: 1, last: 999 }, whole)).toEqual({ first: 1, last: 999 });
});

test("a pointer grabs what is under it", () => {
  const view = { first: 100, last: 199 };
  expect(begun(null, 50, 5)).toEqual({ kind: "new", from: 50 });
  expect(begun(view, 101, 5)).toEqual({ kind: "edge", edge: "first", view });
  expect(begun(view, 203, 5)).toEqual({ kind: "edge", edge: "last", view });
  expect(begun(view, 150, 5)).toEqual({ kind: "move", from: 150, view });
  expect(begun(view, 500, 5)).toEqual({ kind: "new", from: 500 });
  // A window narrower than the grab distance still has both edges.
  expect(begun({ first: 100, last: 101 }, 101, 5)).toMatchObject({ edge: "last" });
  expect(begun({ first: 100, last: 101 }, 100, 5)).toMatchObject({ edge: "first" });
  expect(dragged({ kind: "new", from: 500 }, 450, whole)).toEqual({ first: 450, last: 500 });
  expect(dragged({ kind: "move", from: 150, view }, 160, whole)).toEqual({ first: 110, last: 209 });
});

test("the keyboard can do what the pointer can", () => {
  const view = { first: 100, last: 199 };
  expect(keyed("ArrowRight", view, whole)).toEqual({ first: 110, last: 209 });
  expect(keyed("PageUp", view, whole)).toEqual({ first: 0, last: 99 });
  expect(keyed("End", view, whole)).toEqual({ first: 900, last: 999 });
  expect(keyed("Home", view, whole)).toEqual({ first: 0, last: 99 });
  expect(keyed("+", view, whole)).toEqual({ first: 125, last: 174 });
  expect(keyed("Escape", view, whole)).toBeNull();
  expect(keyed("x", view, whole)).toBeUndefined();
});
