/** Reads a log from the hub in pieces: around a position, the end, before and after, and more of a truncated line. */

import { batch, signal } from "@preact/signals";
import type { FilePiece } from "../api/documents";
import { aborted, type Failure, type Params } from "../api/source";
import { asFailure } from "../run/open-run";
import { cutLines, laterFrom, lineOf, LONGEST, NO_LINES, withEarlier, withLater, type LogLine, type LogLines } from "./log-lines";

export type ReadPiece = (params: Params, signal: AbortSignal) => Promise<FilePiece>;

const PIECE = 64 << 10;
/** The end of a very long line is searched in larger pieces, up to a limit. */
const STRIDE = 4 << 20;
const FARTHEST = 64 << 20;
/** At most this much of one line is shown. */
export const MOST_SHOWN = 1 << 20;

export class LogReader {
  readonly log = signal<LogLines>(NO_LINES);
  readonly size = signal(0);
  readonly failure = signal<Failure | null>(null);
  readonly loaded = signal(false);
  private stop = new AbortController();
  private busy = false;

  constructor(private readonly read: ReadPiece) {}

  close(): void {
    this.stop.abort();
  }

  /** Open around a position; null: at the end. */
  open(at: number | null): Promise<void> {
    this.stop.abort();
    this.stop = new AbortController();
    this.busy = false;
    return this.once(async (signal) => {
      const requested = at === null ? { tail: PIECE } : { offset: Math.max(0, at - PIECE / 2), most: PIECE };
      const piece = await this.piece(requested, signal);
      // The hub starts a tail at a line start if there is one.
      const begun = piece.offset === 0 || (at === null && bytesOf(piece).length < PIECE);
      let found = cutLines(bytesOf(piece), piece.offset, { begun, ended: reachesEnd(piece) });
      if (found.lines.length === 0 && this.size.peek() > 0) found = await this.around(Math.min(at ?? this.size.peek(), this.size.peek()), signal);
      if (signal.aborted) return;
      batch(() => {
        this.log.value = found;
        this.loaded.value = true;
      });
    });
  }

  later(): Promise<void> {
    return this.once(async (signal) => {
      const longer = await this.behind(this.log.peek(), signal);
      if (!signal.aborted) this.log.value = longer;
    });
  }

  earlier(): Promise<void> {
    return this.once(async (signal) => {
      const longer = await this.before(this.log.peek(), signal);
      if (!signal.aborted) this.log.value = longer;
    });
  }

  /** Show more of a truncated line. */
  more(line: LogLine): Promise<void> {
    return this.once(async (signal) => {
      const shown = Math.max(LONGEST, line.end - line.offset - line.more);
      const longest = Math.min(MOST_SHOWN, shown * 16);
      const data = bytesOf(await this.piece({ offset: line.offset, most: Math.min(longest, line.end - line.offset) }, signal));
      const longer = { ...lineOf(data, line.offset, line.end, longest), open: line.open };
      const log = this.log.peek();
      this.log.value = { ...log, lines: log.lines.map((known) => (known.offset === line.offset ? longer : known)) };
    });
  }

  /** Read what was written since. */
  async follow(): Promise<void> {
    const before = this.size.peek();
    await this.later();
    if (this.size.peek() - this.log.peek().end > STRIDE || this.size.peek() < before) await this.open(null);
  }

  /** The lines extended by one piece at the end. */
  private async behind(known: LogLines, signal: AbortSignal): Promise<LogLines> {
    const from = laterFrom(known);
    const piece = await this.piece({ offset: from, most: PIECE }, signal);
    let more = cutLines(bytesOf(piece), from, { begun: true, ended: reachesEnd(piece) });
    if (more.lines.length === 0 && !reachesEnd(piece)) more = one(await this.longLine(from, signal));
    return more.lines.length === 0 ? known : withLater(known, more);
  }

  private async before(known: LogLines, signal: AbortSignal): Promise<LogLines> {
    const { start } = known;
    if (start === 0) return known;
    const from = Math.max(0, start - PIECE);
    const piece = await this.piece({ offset: from, most: start - from }, signal);
    let more = cutLines(bytesOf(piece), from, { begun: from === 0, ended: false });
    if (more.lines.length === 0) more = one(await this.longLine(await this.beginning(start - 1, signal), signal));
    return withEarlier(known, more);
  }

  /** The line at a position, if it is so long that no piece contains its ends. */
  private async around(at: number, signal: AbortSignal): Promise<LogLines> {
    const found = one(await this.longLine(await this.beginning(Math.max(0, at - 1), signal), signal));
    return this.before(await this.behind(found, signal), signal);
  }

  /** Start of the line that contains this byte. */
  private async beginning(at: number, signal: AbortSignal): Promise<number> {
    let end = at;
    while (end > 0 && at - end < FARTHEST) {
      const from = Math.max(0, end - STRIDE);
      const data = bytesOf(await this.piece({ offset: from, most: end - from }, signal));
      const newline = data.lastIndexOf(10);
      if (newline >= 0) return from + newline + 1;
      end = from;
    }
    return end;
  }

  private async longLine(offset: number, signal: AbortSignal): Promise<LogLine> {
    let head: Uint8Array | null = null;
    let at = offset;
    for (;;) {
      const piece = await this.piece({ offset: at, most: at === offset ? PIECE : STRIDE }, signal);
      const data = bytesOf(piece);
      head ??= data;
      const newline = data.indexOf(10);
      if (newline >= 0) return lineOf(head.subarray(0, at === offset ? newline : head.length), offset, at + newline + 1);
      at += data.length;
      if (data.length === 0 || at >= piece.size || at - offset > FARTHEST) return { ...lineOf(head, offset, at), more: Math.max(0, at - offset - Math.min(LONGEST, head.length)), open: at >= piece.size };
    }
  }

  private async piece(params: Params, signal: AbortSignal): Promise<FilePiece> {
    const piece = await this.read(params, signal);
    if (!signal.aborted) this.size.value = piece.size;
    return piece;
  }

  /** One request at a time; others are dropped, and scrolling repeats them. */
  private async once(question: (signal: AbortSignal) => Promise<void>): Promise<void> {
    if (this.busy) return;
    this.busy = true;
    const { signal } = this.stop;
    try {
      await question(signal);
      this.failure.value = null;
    } catch (error) {
      if (aborted(error) || signal.aborted) return;
      this.failure.value = asFailure(error);
    } finally {
      if (!signal.aborted) this.busy = false;
    }
  }
}

function bytesOf(piece: FilePiece): Uint8Array {
  return piece.data ?? new TextEncoder().encode(piece.text);
}

function reachesEnd(piece: FilePiece): boolean {
  return piece.offset + bytesOf(piece).length >= piece.size;
}

function one(line: LogLine): LogLines {
  return { lines: [line], start: line.offset, end: line.end };
}
