/** Columns of steps for tests: `at(i)` describes bin i. */

import type { StepsDocument } from "../src/api/documents";

export interface Bin {
  first: number;
  last?: number;
  wall?: number;
  forward?: number;
  comm?: number;
  start?: number;
  rank?: number;
  memory?: number | null;
  /** Forward on the device; if no bin has it, no device was timed. */
  device?: number | null;
}

export function stepsOf(bins: readonly Bin[]): StepsDocument {
  const column = <T>(read: (bin: Bin) => T): T[] => bins.map(read);
  const forward = (bin: Bin): number => bin.forward ?? 30;
  const comm = (bin: Bin): number => bin.comm ?? 10;
  const wall = (bin: Bin): number => bin.wall ?? forward(bin) + comm(bin);
  const row = (value: number): number[] => [value - 2, value, value + 2];
  return {
    first: column((bin) => bin.first),
    last: column((bin) => bin.last ?? bin.first),
    steps: column((bin) => (bin.last ?? bin.first) - bin.first + 1),
    ranks: column(() => 4),
    quantiles: [0, 0.5, 1],
    ns: { wall: column((bin) => row(wall(bin))), forward: column((bin) => row(forward(bin))), comm: column((bin) => row(comm(bin))) },
    mean_ns: { wall: column(wall), work: column(forward), forward: column(forward), comm: column(comm) },
    device_mean_ns: bins.some(({ device }) => device !== undefined) ? { forward: column((bin) => bin.device ?? null) } : {},
    device_slowest_ns: column((bin) => (bin.device === undefined || bin.device === null ? null : bin.device + 10)),
    worst: column((bin) => [{ rank: bin.rank ?? 2, step: bin.first, wall: wall(bin), work: forward(bin) + 5, forward: forward(bin) + 5, comm: comm(bin) - 5 }]),
    start_wall_ns: column((bin) => bin.start ?? 1e18 + bin.first * 1e9),
    memory_bytes: { allocated: column((bin) => bin.memory ?? null), reserved: column(() => null) },
  };
}

export const single = (count: number): StepsDocument => stepsOf(Array.from({ length: count }, (_, first) => ({ first })));
