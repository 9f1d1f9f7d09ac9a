import { expect, test } from "vitest";
import { Fingers } from "../src/charts/fingers";
import { attachFingers, fingered, type Movable } from "../src/charts/plot-fingers";
import { ENDLESS, heldSpan, movedSpan, zoomedSpan, type Span } from "../src/charts/span";

const ALL: Span = [-0.5, 99.5];
const WIDTH = 200;

/** A chart of `WIDTH` pixels, 10 from the left edge, and the calls that it received. */
function chart(start: Movable | null) {
  const told: string[] = [];
  const over = Object.assign(new EventTarget(), { clientWidth: WIDTH, getBoundingClientRect: () => ({ left: 10, top: 0 }) });
  attachFingers(over as unknown as HTMLElement, {
    movable: () => start,
    show: ([from, to]) => told.push(`show ${from} ${to}`),
    rested: ([from, to]) => told.push(`rested ${from} ${to}`),
  });
  const finger = (type: string, pointerId: number, x: number, pointerType = "touch"): void => {
    over.dispatchEvent(Object.assign(new Event(`pointer${type}`), { pointerId, pointerType, clientX: x + 10, clientY: 50 }));
  };
  const touched = (touches: number): boolean => {
    const event = Object.assign(new Event("touchmove", { cancelable: true }), { touches: { length: touches } });
    over.dispatchEvent(event);
    return event.defaultPrevented;
  };
  return { told, finger, touched };
}

test("two fingers: movement and zoom", () => {
  const fingers = new Fingers();
  fingers.put(1, { x: 100, y: 50 });
  expect(fingers.move(1, { x: 90, y: 50 })).toEqual({ before: { x: 100, y: 50 }, pinch: null });
  fingers.put(2, { x: 190, y: 50 });
  expect(fingers.move(1, { x: 140, y: 50 })).toEqual({ before: { x: 90, y: 50 }, pinch: { from: { x: 140, y: 50 }, to: { x: 165, y: 50 }, by: 2 } });
  expect(fingers.move(1, { x: 185, y: 50 })?.pinch?.by).toBe(2.5); // and not 10: fingers are 20 pixels wide
  fingers.put(3, { x: 0, y: 0 });
  expect(fingers.move(2, { x: 0, y: 0 })?.pinch).toBeNull();
  expect([fingers.count, fingers.lift(2), fingers.lift(2), fingers.move(2, { x: 1, y: 1 })]).toEqual([3, true, false, null]);
});

test("a span stays in its limits, and content stays between the fingers", () => {
  expect(movedSpan([10, 20], ALL, -50)).toEqual([-0.5, 9.5]);
  expect(movedSpan([10, 20], ENDLESS, -50)).toEqual([-40, -30]);
  expect(heldSpan([10, 11], ALL, 4)).toEqual([8.5, 12.5]);
  expect(heldSpan([-100, 300], ALL, 4)).toEqual(ALL);
  expect(heldSpan(zoomedSpan([0, 100], 25, 0.5), ENDLESS, 0)).toEqual([12.5, 62.5]);
  const pinch = { from: { x: 100, y: 0 }, to: { x: 50, y: 0 }, by: 0.5 };
  const seen = fingered({ span: ALL, all: ALL, smallest: 4 }, WIDTH, { before: { x: 0, y: 0 }, pinch }, 0);
  expect(seen).toEqual([12, 62]); // all was seen, so it could not slide: around step 24.5, where the fingers are
});

test("a chart follows two fingers and reports once, when both are lifted", () => {
  const { told, finger, touched } = chart({ span: ALL, all: ALL, smallest: 4 });
  finger("down", 1, 80);
  finger("down", 2, 120);
  finger("move", 1, 60);
  finger("move", 2, 140);
  expect([touched(1), touched(2)]).toEqual([false, true]);
  finger("up", 1, 60);
  expect(told.at(-1)).toMatch(/^show/);
  finger("up", 2, 140);
  expect(told.map((one) => one.split(" ")[0])).toEqual(["show", "show", "rested"]);
  const [, from, to] = (told.at(-1) ?? "").split(" ").map(Number) as [number, number, number];
  expect(to - from).toBeCloseTo(50, 9);
  finger("move", 2, 10);
  expect(told.length).toBe(3);
});

test("one finger moves a movable chart sideways; a tap and the mouse do not", () => {
  const { told, finger } = chart({ span: [39.5, 59.5], all: ALL, smallest: 4 });
  finger("down", 1, 100);
  finger("move", 1, 103);
  finger("up", 1, 103);
  finger("down", 1, 100, "mouse");
  finger("move", 1, 150, "mouse");
  finger("up", 1, 150, "mouse");
  expect(told).toEqual([]);
  finger("down", 1, 100);
  finger("move", 1, 110);
  finger("cancel", 1, 110); // the page scrolls
  expect(told).toEqual(["show 38.5 58.5", "rested 38.5 58.5"]);
  const fixed = chart(null);
  fixed.finger("down", 1, 100);
  fixed.finger("move", 1, 150);
  fixed.finger("up", 1, 150);
  expect(fixed.told).toEqual([]);
});
