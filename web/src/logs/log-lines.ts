/**
 * A stretch of a log: its lines, each with its place in the file in bytes.
 *
 * Pieces come from the hub as bytes and are cut at line ends, so that a letter is never cut apart. Of a very long line only
 * the beginning is kept, with how long it is. At most `MOST_LINES` lines are held: those farthest from what is read go first.
 */

import { plainLine } from "./plain-text";

export interface LogLine {
  /** Of its first byte. */
  offset: number;
  /** Behind its last, with the line end. */
  end: number;
  text: string;
  /** Bytes that are not in the text. */
  more: number;
  /** The file ends within it: its rest may still come. */
  open: boolean;
}

export interface LogLines {
  lines: LogLine[];
  /** What of the file they are: from `start` to before `end`. */
  start: number;
  end: number;
}

export const MOST_LINES = 2000;
/** Bytes of a line that are shown at first. */
export const LONGEST = 4096;
const NEWLINE = 10;

export const NO_LINES: LogLines = { lines: [], start: 0, end: 0 };

/**
 * The whole lines within bytes that begin at `offset` of the file. `begun`: they begin with a line's beginning; `ended`: a
 * last line without an end is one nevertheless (the file ends there).
 */
export function cutLines(data: Uint8Array, offset: number, { begun, ended }: { begun: boolean; ended: boolean }): LogLines {
  let from = begun ? 0 : data.indexOf(NEWLINE) + 1;
  if (!begun && from === 0) return { lines: [], start: offset + data.length, end: offset + data.length };
  const start = offset + from;
  const lines: LogLine[] = [];
  for (let at = data.indexOf(NEWLINE, from); at >= 0; at = data.indexOf(NEWLINE, from)) {
    lines.push(lineOf(data.subarray(from, at), offset + from, offset + at + 1));
    from = at + 1;
  }
  if (ended && from < data.length) {
    lines.push({ ...lineOf(data.subarray(from), offset + from, offset + data.length), open: true });
    from = data.length;
  }
  return { lines, start, end: offset + from };
}

/** A line of `data`, of which only a part may be shown; `end` is the byte behind it in the file. */
export function lineOf(data: Uint8Array, offset: number, end: number, longest = LONGEST): LogLine {
  const shown = data.length > longest ? wholeLetters(data.subarray(0, longest)) : data;
  const newline = end - offset > data.length ? 1 : 0;
  return { offset, end, text: plainLine(new TextDecoder().decode(shown)), more: Math.max(0, end - offset - newline - shown.length), open: false };
}

/** Without the beginning of a letter whose rest is cut off. */
export function wholeLetters(data: Uint8Array): Uint8Array {
  let at = data.length - 1;
  while (at >= 0 && data.length - at <= 4 && ((data[at] ?? 0) & 0xc0) === 0x80) at -= 1;
  const lead = data[at] ?? 0;
  const length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  return at >= 0 && data.length - at < length ? data.subarray(0, at) : data;
}

/** Where to read on: a line that was not ended is read anew. */
export function laterFrom(known: LogLines): number {
  const last = known.lines.at(-1);
  return last?.open ? last.offset : known.end;
}

export function withLater(known: LogLines, more: LogLines): LogLines {
  const lines = [...known.lines.filter((line) => !line.open), ...more.lines];
  if (lines.length === 0) return more;
  const kept = lines.slice(-MOST_LINES);
  return { lines: kept, start: kept[0]?.offset ?? more.end, end: more.end };
}

export function withEarlier(known: LogLines, more: LogLines): LogLines {
  if (known.lines.length === 0) return { ...more, end: known.end };
  const kept = [...more.lines, ...known.lines].slice(0, MOST_LINES);
  return { lines: kept, start: more.lines[0]?.offset ?? known.start, end: kept.at(-1)?.end ?? known.end };
}

/** Before which line a place lies; as many as there are lines: behind all of them. */
export function lineAt(lines: readonly LogLine[], offset: number): number {
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((lines[middle]?.end ?? 0) <= offset) low = middle + 1;
    else high = middle;
  }
  return low;
}
