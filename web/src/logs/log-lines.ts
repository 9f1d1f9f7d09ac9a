/**
 * A part of a log: its lines, each with its byte offset in the file.
 *
 * The hub's pieces are bytes and are split at line ends, so that no character is split. Of a very long line only the start
 * is kept, with its full length. At most `MOST_LINES` lines are kept; those farthest from the reader are dropped first.
 */

import { plainLine } from "./plain-text";

export interface LogLine {
  /** Offset of its first byte. */
  offset: number;
  /** Offset after its last byte, including the line end. */
  end: number;
  text: string;
  /** Bytes not included in `text`. */
  more: number;
  /** The file ends within this line: more may follow. */
  open: boolean;
}

export interface LogLines {
  lines: LogLine[];
  /** The byte range in the file: [start, end). */
  start: number;
  end: number;
}

export const MOST_LINES = 2000;
/** Bytes of a line shown initially. */
export const LONGEST = 4096;
const NEWLINE = 10;

export const NO_LINES: LogLines = { lines: [], start: 0, end: 0 };

/**
 * The complete lines in bytes that start at `offset` of the file. `begun`: the data starts at a line start; `ended`: the
 * file ends here, so a last line without line end counts.
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

/** A line from `data`, possibly truncated; `end` is the offset after it in the file. */
export function lineOf(data: Uint8Array, offset: number, end: number, longest = LONGEST): LogLine {
  const shown = data.length > longest ? wholeLetters(data.subarray(0, longest)) : data;
  const newline = end - offset > data.length ? 1 : 0;
  return { offset, end, text: plainLine(new TextDecoder().decode(shown)), more: Math.max(0, end - offset - newline - shown.length), open: false };
}

/** Drop an incomplete UTF-8 character at the end. */
export function wholeLetters(data: Uint8Array): Uint8Array {
  let at = data.length - 1;
  while (at >= 0 && data.length - at <= 4 && ((data[at] ?? 0) & 0xc0) === 0x80) at -= 1;
  const lead = data[at] ?? 0;
  const length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  return at >= 0 && data.length - at < length ? data.subarray(0, at) : data;
}

/** Where to continue reading: an unfinished line is read again. */
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

/** Index of the line before which an offset lies; `lines.length`: after all of them. */
export function lineAt(lines: readonly LogLine[], offset: number): number {
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((lines[middle]?.end ?? 0) <= offset) low = middle + 1;
    else high = middle;
  }
  return low;
}
