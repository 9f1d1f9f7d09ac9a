/** Decode the hub's binary rank × step map (docs/api.md, "heat"). */

import type { Heat } from "./documents";

export const HEAT_TYPE = "application/vnd.stepscope.heat";
const MAGIC = 0x4d485453; // "STHM", little endian
const HEAD_BYTES = 16;

/** Throws a RangeError for anything but a complete map. */
export function readHeat(bytes: ArrayBuffer, unit: string | null, knownFrom: string | null): Heat {
  const head = new DataView(bytes);
  if (bytes.byteLength < HEAD_BYTES || head.getUint32(0, true) !== MAGIC || head.getUint16(4, true) !== 1) {
    throw new RangeError("not a map of ranks and steps");
  }
  const rows = head.getUint32(8, true);
  const columns = head.getUint32(12, true);
  if (bytes.byteLength !== HEAD_BYTES + 8 * (rows + columns) + 4 * rows * columns) {
    throw new RangeError("truncated map of ranks and steps");
  }
  let at = HEAD_BYTES;
  const edges = (count: number): Uint32Array => {
    const found = new Uint32Array(bytes, at, count);
    at += 4 * count;
    return found;
  };
  return {
    unit: unit === "bytes" ? "bytes" : "ns",
    exact: head.getUint16(6, true) === 1,
    knownFrom: Number(knownFrom ?? 0) || 0,
    firstRanks: edges(rows),
    lastRanks: edges(rows),
    firstSteps: edges(columns),
    lastSteps: edges(columns),
    cells: new Float32Array(bytes, at, rows * columns),
  };
}
