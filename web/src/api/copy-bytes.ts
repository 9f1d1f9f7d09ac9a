/**
 * The data inside a report's file, as packed by `stepscope.page.assets`: base64 of gzip of a header, JSON and blobs. The JSON is
 * a copy of a run (`stepscope.hub.report_copy`) or a report on other files (report-document.ts).
 *
 * Any defect (truncated, altered, written by a later version) raises a Failure that describes it.
 */

import { Failure } from "./source";

/** Id of the element that holds the data. */
export const DATA_ID = "stepscope-data";
const MAGIC = 0x50435453; // "STCP", little endian
const HEAD_BYTES = 12;
const VERSION = 1;
const UNKNOWN = 0;
const ZERO = 1;
const FIRST = 2;

/** Times, or other positive numbers, as logarithms; see the Python side. */
export interface PackedTimes {
  times: [at: number, length: number];
  least: number;
  step: number;
}

export interface PackedMap {
  unit: string;
  exact: boolean;
  first_ranks: number[];
  last_ranks: number[];
  first_steps: number[];
  last_steps: number[];
  cells: PackedTimes;
}

export interface PackedFile {
  size: number;
  pieces: [offset: number, at: number, length: number][];
}

export interface Copy {
  run: string;
  name: string;
  made_wall_ns: number;
  stepscope: string;
  over: boolean;
  row: Record<string, unknown>;
  left_out: string[];
  answers: Record<string, unknown>;
  /** By value: a map of the whole run, and one of the newest steps if the first one is binned. */
  maps: Record<string, PackedMap[]>;
  files: Record<string, PackedFile>;
  blobs: Uint8Array;
}

export const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

export interface FileData {
  json: Record<string, unknown>;
  blobs: Uint8Array;
}

/** Rejects with a Failure. */
export async function readData(base64: string): Promise<FileData> {
  const bytes = await unzipped(decoded(base64));
  const head = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length < HEAD_BYTES || head.getUint32(0, true) !== MAGIC) throw damaged("it was not written by Stepscope");
  if (head.getUint16(4, true) !== VERSION) throw damaged("another version of Stepscope wrote it");
  const end = HEAD_BYTES + head.getUint32(8, true);
  if (end > bytes.length) throw damaged("part of it is missing");
  let found: unknown;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(HEAD_BYTES, end)));
  } catch {
    throw damaged("it cannot be read");
  }
  if (!isRecord(found)) throw damaged("it contains no report");
  return { json: found, blobs: bytes.subarray(end) };
}

/** Throws a Failure. */
export function copyOf({ json: found, blobs }: FileData): Copy {
  if (typeof found["run"] !== "string" || !isRecord(found["answers"])) throw damaged("it contains no run");
  return {
    run: found["run"],
    name: typeof found["name"] === "string" ? found["name"] : found["run"],
    made_wall_ns: typeof found["made_wall_ns"] === "number" ? found["made_wall_ns"] : 0,
    stepscope: typeof found["stepscope"] === "string" ? found["stepscope"] : "",
    over: found["over"] !== false,
    row: isRecord(found["row"]) ? found["row"] : {},
    left_out: Array.isArray(found["left_out"]) ? found["left_out"].filter((line) => typeof line === "string") : [],
    answers: found["answers"],
    maps: isRecord(found["maps"]) ? (found["maps"] as Record<string, PackedMap[]>) : {},
    files: isRecord(found["files"]) ? (found["files"] as Record<string, PackedFile>) : {},
    blobs,
  };
}

/** NaN: unknown. Values are rounded to four digits, their precision. */
export function unpackTimes(packed: PackedTimes, blobs: Uint8Array): Float64Array {
  const [at, length] = packed.times;
  const count = length / 2;
  if (!Number.isInteger(count) || at < 0 || at + length > blobs.length) throw damaged("part of it is missing");
  const values: number[] = [];
  const valueOf = (code: number): number => {
    if (code === UNKNOWN) return Number.NaN;
    if (code === ZERO) return 0;
    return Number((packed.least * Math.exp((code - FIRST) * packed.step)).toPrecision(4));
  };
  const found = new Float64Array(count);
  for (let place = 0; place < count; place += 1) {
    const code = (blobs[at + place] ?? 0) | ((blobs[at + count + place] ?? 0) << 8);
    found[place] = values[code] ??= valueOf(code);
  }
  return found;
}

export const isPacked = (value: unknown): value is PackedTimes =>
  isRecord(value) && Array.isArray(value["times"]) && typeof value["least"] === "number" && typeof value["step"] === "number";

/** A document with all columns unpacked; null: unknown. */
export function unpacked(value: unknown, blobs: Uint8Array): unknown {
  if (isPacked(value)) return Array.from(unpackTimes(value, blobs), (time) => (Number.isNaN(time) ? null : time));
  if (!isRecord(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, unpacked(inner, blobs)]));
}

export function damaged(why: string): Failure {
  return new Failure("fault", `The data in this file cannot be used: ${why}. It may have been truncated in transit; get a new copy.`);
}

function decoded(base64: string): Uint8Array<ArrayBuffer> {
  let text: string;
  try {
    text = atob(base64.trim());
  } catch {
    throw damaged("it is incomplete");
  }
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

async function unzipped(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array> {
  if (typeof DecompressionStream === "undefined") {
    throw new Failure("fault", "This browser is too old to open this file. Use one released in 2023 or later.");
  }
  try {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    throw damaged("it is incomplete");
  }
}
