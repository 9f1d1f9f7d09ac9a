/** The data in report.html: round trips in any range and order; damage is reported, never shown. */

import { describe, expect, it } from "vitest";
import type { EventsDocument, RanksDocument, SamplesDocument, StepsDocument } from "../src/api/documents";
import { FileSource } from "../src/api/file-source";
import { Failure } from "../src/api/source";

const STEP = 0.0025;

/** Packs data like `stepscope.hub.report_copy`. */
class Packer {
  bytes: number[] = [];

  times(values: number[]): unknown {
    const least = Math.min(...values.filter((value) => value > 0), 1e18);
    const codes = values.map((value) => (Number.isNaN(value) ? 0 : value > 0 ? 2 + Math.round(Math.log(value / least) / STEP) : 1));
    const at = this.bytes.length;
    this.bytes.push(...codes.map((code) => code & 255), ...codes.map((code) => code >> 8));
    return { times: [at, 2 * codes.length], least, step: STEP };
  }

  text(text: string): [number, number] {
    const at = this.bytes.length;
    this.bytes.push(...new TextEncoder().encode(text));
    return [at, this.bytes.length - at];
  }

  async wrap(document: unknown, version = 1): Promise<string> {
    const json = new TextEncoder().encode(JSON.stringify(document));
    const head = new DataView(new ArrayBuffer(12));
    [..."STCP"].forEach((letter, at) => head.setUint8(at, letter.charCodeAt(0)));
    head.setUint16(4, version, true);
    head.setUint32(8, json.length, true);
    return gzip(new Blob([head, json, new Uint8Array(this.bytes)]));
  }
}

/** Base64, as in the file. */
async function gzip(data: Blob): Promise<string> {
  const packed = await new Response(data.stream().pipeThrough(new CompressionStream("gzip"))).arrayBuffer();
  return btoa(String.fromCharCode(...new Uint8Array(packed)));
}

/** Eight steps in four bins of two; three ranks. */
function example(): { packer: Packer; document: Record<string, unknown> } {
  const packer = new Packer();
  const steps = {
    attempt: 0,
    first: [0, 2, 4, 6],
    last: [1, 3, 5, 7],
    steps: [2, 2, 2, 2],
    ranks: [3, 3, 3, 2],
    quantiles: [0, 0.5, 1],
    ns: { wall: packer.times([10, 20, 30, 11, 21, 31, 12, 22, 32, 13, 23, 33].map((ms) => ms * 1e6)) },
    mean_ns: { wall: packer.times([20e6, 21e6, 22e6, 23e6]) },
    device_mean_ns: { forward: packer.times([NaN, 8e6, NaN, NaN]) },
    worst: {
      names: ["wall", "work"],
      places: 2,
      rank: [[1, 0], [1, 2], [1], []],
      step: [[0, 1], [2, 3], [4], []],
      values: packer.times([30e6, 25e6, 29e6, 24e6, 31e6, 28e6, 30e6, 20e6, 32e6, 32e6, NaN, NaN, NaN, NaN, NaN, NaN]),
    },
    start_wall_ns: [1, 2, 3, 4],
    memory_bytes: { allocated: [1, null, 3, 2] },
  };
  const ranks = { total: 5, start: 0, order: "work", rank: [1, 2, 0], host: ["b", "c", "a"], mean_ns: { work: [30, 20, 10] } };
  const samples = { kind: "host", stat: "mean", wall_ns: [0, 10, 20, 30], bin_ns: 10, left_out: 0, series: [{ node: "n0", values: { cpu_percent: [1, 3, null, 5], rss: [1, 1, 1, 1] } }, { node: "n1", values: { cpu_percent: [9, 9, 9, 9] } }] };
  const map = { unit: "ns", exact: true, first_ranks: [0, 1], last_ranks: [0, 1], first_steps: [0, 1, 2, 3], last_steps: [0, 1, 2, 3], cells: packer.times([1, 5, NaN, 2, 4, 3, 2, NaN].map((ms) => ms * 1e6)) };
  const [first, last] = [packer.text("hello ü\n"), packer.text("bye\n")];
  const events = { total: 3, next: 3, events: [1, 2, 3].map((number) => ({ number, node: "n0", wall_ns: number, event: number === 2 ? "note" : "warning" })) };
  const answers = { "": { id: "night", over: true }, steps, findings: { live: false, verdict: null, findings: [] }, events, ranks, "ranks/1": { rank: 1, steps: { first: [0, 4], last: [3, 7], wall_ns: packer.times([1e6, 2e6]), phase_ns: {} }, past: { first: [], last: [] } }, "samples/host": samples, hangs: { hangs: [], unread: [] } };
  const files = { "logs/rank-0.log": { size: 1000, pieces: [[0, ...first], [996, ...last]] } };
  return { packer, document: { schema: 1, run: "night", name: "night <b>", made_wall_ns: 5, stepscope: "1", over: true, row: {}, left_out: ["x"], answers, maps: { work: [map] }, files } };
}

async function opened(): Promise<FileSource> {
  const { packer, document } = example();
  return FileSource.open(await packer.wrap(document));
}

describe("a copy", () => {
  it("returns the original steps to an eighth of a percent", async () => {
    const steps = await (await opened()).get<StepsDocument>("runs/night/steps");
    expect(steps.first).toEqual([0, 2, 4, 6]);
    steps.ns["wall"]?.flat().forEach((value, at) => {
      const real = [10, 20, 30, 11, 21, 31, 12, 22, 32, 13, 23, 33][at]! * 1e6;
      expect(Math.abs(value / real - 1)).toBeLessThan(0.00126 + 0.0005);
    });
    expect(steps.worst[2]?.map(({ rank, step }) => [rank, step])).toEqual([[1, 4]]);
  });

  it("merges bins like the hub", async () => {
    const steps = await (await opened()).get<StepsDocument>("runs/night/steps", { bins: 2, worst: 3 });
    expect([steps.first, steps.last, steps.steps, steps.ranks]).toEqual([[0, 4], [3, 7], [4, 4], [3, 3]]);
    const [least, middle, most] = steps.ns["wall"]?.[0] ?? [];
    expect(Math.round(least! / 1e6)).toBe(10);
    expect(middle! / 1e6).toBeCloseTo(20.5, 1);
    expect(Math.round(most! / 1e6)).toBe(31);
    expect(steps.memory_bytes["allocated"]).toEqual([1, 3]);
    expect(steps.device_mean_ns).toEqual({ forward: [8e6, null] });
    expect(steps.worst[0]?.map(({ rank, step }) => [rank, step])).toEqual([[1, 2], [1, 0], [0, 1]]);
    const part = await (await opened()).get<StepsDocument>("runs/night/steps", { first: 3, last: 4 });
    expect(part.first).toEqual([2, 4]);
  });

  it("sorts and cuts ranks, samples, events and one rank", async () => {
    const source = await opened();
    expect((await source.get<RanksDocument>("runs/night/ranks", { limit: 2 })).rank).toEqual([0, 1]);
    const worst = await source.get<RanksDocument>("runs/night/ranks", { order: "work", ranks: "0-1" });
    expect([worst.rank, worst.host, worst.mean_ns["work"], worst.total]).toEqual([[1, 0], ["b", "a"], [30, 10], 5]);
    await expect(source.get("runs/night/ranks", { order: "nonsense" })).rejects.toBeInstanceOf(Failure);
    const samples = await source.get<SamplesDocument>("runs/night/samples", { nodes: "n0", fields: "cpu_percent", bins: 2 });
    expect([samples.wall_ns, samples.bin_ns, samples.series[0]?.values]).toEqual([[0, 20], 20, { cpu_percent: [2, 5] }]);
    await expect(source.get("runs/night/samples", { stat: "max" })).rejects.toMatchObject({ trouble: "missing" });
    const events = await source.get<EventsDocument>("runs/night/events", { after: 1, event: "note" });
    expect(events.events.map(({ number }) => number)).toEqual([2]);
    const rank = await source.get<{ steps: { first: number[]; wall_ns: number[] } }>("runs/night/ranks/1", { first: 4 });
    expect([rank.steps.first, rank.steps.wall_ns]).toEqual([[4], [1.999e6]]);
    await expect(source.get("runs/night/ranks/2")).rejects.toMatchObject({ trouble: "missing" });
    await expect(source.get("runs/other")).rejects.toMatchObject({ trouble: "missing" });
    await expect(source.get("runs/night/constructor")).rejects.toMatchObject({ trouble: "missing" });
  });

  it("cuts the map", async () => {
    const source = await opened();
    const heat = await source.heat("night", { value: "work", first: 1, last: 2, rank_bins: 1 });
    expect([[...heat.firstRanks], [...heat.lastRanks], [...heat.firstSteps]]).toEqual([[0], [1], [1, 2]]);
    expect([...heat.cells].map((cell) => Math.round(cell / 1e6))).toEqual([5, 2]);
    await expect(source.heat("night", { value: "toString" })).rejects.toBeInstanceOf(Failure);
  });

  it("returns the parts of a file that it has, and fails for others", async () => {
    const source = await opened();
    expect(await source.file("night", "logs/rank-0.log")).toMatchObject({ text: "hello ü\n", offset: 0, size: 1000 });
    expect(await source.file("night", "logs/rank-0.log", { offset: 6, most: 2 })).toMatchObject({ text: "ü", offset: 6, size: 1000 });
    expect(await source.file("night", "logs/rank-0.log", { tail: 500 })).toMatchObject({ text: "bye\n", offset: 996, size: 1000 });
    expect((await source.file("night", "logs/rank-0.log", { offset: 1000 })).text).toBe("");
    await expect(source.file("night", "logs/rank-0.log", { offset: 500 })).rejects.toMatchObject({ trouble: "missing" });
    await expect(source.file("night", "hub.json")).rejects.toMatchObject({ trouble: "missing" });
  });
});

describe("a damaged copy", () => {
  it("reports any missing part", async () => {
    const { packer, document } = example();
    const whole = await packer.wrap(document);
    const wrong = [
      "",
      "%%%",
      btoa("no gzip"),
      await gzip(new Blob(["short"])),
      await gzip(new Blob(["something else of ours"])),
      await packer.wrap(document, 9),
      await packer.wrap([1]),
      await packer.wrap({ ...document, answers: {} }),
      await new Packer().wrap(document),
    ];
    for (let at = 4; at < whole.length; at += 8) wrong.push(whole.slice(0, at));
    for (const data of wrong) await expect(FileSource.open(data)).rejects.toBeInstanceOf(Failure);
  });

  it("fails with a reason if single answers are malformed", async () => {
    for (const other of [null, 5, "x", [], {}, { first: 3 }, { series: 1 }, { steps: [], past: 1 }]) {
      for (const name of ["ranks", "samples/host", "ranks/1", "events", "steps", ""]) {
        const { packer, document } = example();
        (document["answers"] as Record<string, unknown>)[name] = other;
        (document as { maps: unknown }).maps = { work: other };
        const asked = packer.wrap(document).then(FileSource.open).then(async (source) => {
          const questions = [source.get("runs/night/ranks"), source.get("runs/night/samples"), source.get("runs/night/ranks/1"), source.get("runs/night/events"), source.get("runs/night/steps"), source.heat("night", {})];
          for (const outcome of await Promise.allSettled(questions)) {
            if (outcome.status === "rejected") expect(outcome.reason).toBeInstanceOf(Failure);
          }
        });
        await asked.catch((error: unknown) => expect(error).toBeInstanceOf(Failure));
      }
    }
  });
});
