import { expect, test } from "vitest";
import type { FilePiece } from "../src/api/documents";
import type { Params } from "../src/api/source";
import { logOf } from "../src/logs/log-choice";
import { cutLines, lineAt, lineOf, MOST_LINES, wholeLetters, type LogLines } from "../src/logs/log-lines";
import { marksOf, placeAt } from "../src/logs/log-place";
import { LogReader } from "../src/logs/log-reader";
import { plainLine } from "../src/logs/plain-text";

const encode = (text: string): Uint8Array => new TextEncoder().encode(text);

test.each([
  ["\u001b[1;31mred\u001b[0m plain", "red plain"],
  ["\u001b[2K\u001b[1Gdone", "done"],
  ["\u001b]0;title\u0007text", "text"],
  ["\u001b]8;;https://x.example\u001b\\link\u001b]8;;\u001b\\", "link"],
  ["\u009b31mred", "red"],
  ["  0%|   |\r 50%|█  |\r100%|███|", "100%|███|"],
  ["kept\r", "kept"],
  ["a\tb", "a\tb"],
  ["a\u0000b\u0007\u007f", "a␀b␇␡"],
  ["user\u202egnp.exe", "user⟨U+202E⟩gnp.exe"],
  ["\u0085", "⟨U+0085⟩"],
  ["<script>alert(1)</script>", "<script>alert(1)</script>"],
  ["\u001b", ""],
  ["\u001b[", ""],
])("%j is shown as %j", (printed, shown) => {
  expect(plainLine(printed)).toBe(shown);
});

test("no control characters are left, whatever is printed", () => {
  let seed = 3;
  const random = (below: number): number => {
    seed = (seed * 1103515245 + 12345) & 0x7fffffff;
    return Math.floor((seed / 0x7fffffff) * below);
  };
  const letters = ["\u001b", "[", "]", "0", ";", "m", "\u0007", "\\", "\r", "a", "ü", "\u009b", "\u202e", "\u0000", "P", " ", "?", "🎉", "\u200b", "\u001f"];
  for (let turn = 0; turn < 1500; turn += 1) {
    const printed = Array.from({ length: random(24) }, () => letters[random(letters.length)]).join("");
    // eslint-disable-next-line no-control-regex
    expect(plainLine(printed)).not.toMatch(/[\u0000-\u0008\u000a-\u001f\u007f-\u009f\u202a-\u202e\u200b]/);
  }
});

test("lines have byte offsets, and characters are never split", () => {
  const found = cutLines(encode("früh\n\nspät\noff"), 100, { begun: true, ended: true });
  expect(found.lines.map((line) => [line.offset, line.end, line.text, line.open])).toEqual([
    [100, 106, "früh", false],
    [106, 107, "", false],
    [107, 113, "spät", false],
    [113, 116, "off", true],
  ]);
  expect([found.start, found.end]).toEqual([100, 116]);
  const cut = cutLines(encode("rest\nwhole\nbegun"), 10, { begun: false, ended: false });
  expect([cut.lines.map((line) => line.text), cut.start, cut.end]).toEqual([["whole"], 15, 21]);
  for (const text of ["aü", "a€", "a🎉"]) {
    const data = encode(text);
    for (let end = 1; end < data.length; end += 1) expect(new TextDecoder().decode(wholeLetters(data.subarray(0, end)))).toBe("a");
    expect(new TextDecoder().decode(wholeLetters(data))).toBe(text);
  }
});

test("the lines do not depend on how a log is split into pieces", () => {
  const text = Array.from({ length: 40 }, (_none, at) => `line ${at} ${"ü".repeat(at)}`).join("\n") + "\n";
  const data = encode(text);
  const whole = cutLines(data, 0, { begun: true, ended: true }).lines;
  for (let size = 60; size < 400; size += 17) {
    const lines = [];
    for (let at = 0; at < data.length; ) {
      const found = cutLines(data.subarray(at, at + size), at, { begun: true, ended: at + size >= data.length });
      lines.push(...found.lines);
      if (found.end === at) break;
      at = found.end;
    }
    if (size > 100) expect(lines).toEqual(whole);
  }
  expect(lineAt(whole, 0)).toBe(0);
  expect(lineAt(whole, whole[7]?.offset ?? 0)).toBe(7);
  expect(lineAt(whole, data.length)).toBe(40);
});

test("a long line is truncated, with the number of hidden bytes", () => {
  const line = lineOf(encode("x".repeat(10_000)), 5, 5 + 10_001);
  expect([line.text.length, line.more]).toEqual([4096, 5904]);
});

/** A file that a hub returns in pieces. */
function readerOf(file: { data: Uint8Array }, asked: Params[] = []): LogReader {
  return new LogReader((params) => {
    asked.push(params);
    const { data } = file;
    let offset = Math.min(Number(params["offset"] ?? 0), data.length);
    let piece = data.subarray(offset, offset + Number(params["most"] ?? 1 << 22));
    if (params["tail"] !== undefined) {
      offset = Math.max(0, data.length - Number(params["tail"]));
      piece = data.subarray(offset);
      const newline = piece.indexOf(10);
      if (offset > 0 && newline >= 0) [offset, piece] = [offset + newline + 1, piece.subarray(newline + 1)];
    }
    return Promise.resolve<FilePiece>({ text: new TextDecoder().decode(piece), data: piece, offset, size: data.length });
  });
}

const texts = (log: LogLines): string[] => log.lines.map((line) => line.text);

test("a log is read around a position, then in both directions to its ends", async () => {
  const all = Array.from({ length: 9000 }, (_none, at) => `step ${at} of a log that is long enough`);
  const file = { data: encode(all.join("\n") + "\n") };
  const reader = readerOf(file);
  const place = encode(all.slice(0, 5000).join("\n") + "\n").length;
  await reader.open(place);
  const { lines } = reader.log.value;
  expect(lines[lineAt(lines, place)]?.text).toBe(all[5000]);
  for (let turn = 0; turn < 20; turn += 1) await reader.earlier();
  expect(reader.log.value.start).toBe(0);
  expect(texts(reader.log.value)).toEqual(all.slice(0, MOST_LINES));
  for (let turn = 0; turn < 20; turn += 1) await reader.later();
  expect(texts(reader.log.value)).toEqual(all.slice(-MOST_LINES));
  expect(reader.log.value.end).toBe(file.data.length);
});

test("the end is followed, and an unfinished line is read again", async () => {
  const file = { data: encode("one\ntwo\nthr") };
  const reader = readerOf(file);
  await reader.open(null);
  expect(texts(reader.log.value)).toEqual(["one", "two", "thr"]);
  file.data = encode("one\ntwo\nthree\nfour\n");
  await reader.follow();
  await reader.follow();
  expect(texts(reader.log.value)).toEqual(["one", "two", "three", "four"]);
  file.data = encode("new\n");
  await reader.follow();
  expect(texts(reader.log.value)).toEqual(["new"]);
});

test("a line of ten megabytes is truncated, its neighbors are loaded, and more of it can be shown", async () => {
  const file = { data: encode(`before\n${"x".repeat(10_000_000)}\nafter\n`) };
  for (const place of [5_000_000, null]) {
    const asked: Params[] = [];
    const reader = readerOf(file, asked);
    await reader.open(place);
    for (let turn = 0; turn < 2; turn += 1) {
      await reader.earlier();
      await reader.later();
    }
    const { lines } = reader.log.value;
    expect(lines.map((line) => line.text.slice(0, 6))).toEqual(["before", "xxxxxx", "after"]);
    expect(lines[1]?.more).toBe(10_000_000 - 4096);
    expect(asked.length).toBeLessThan(16);
    for (let turn = 0; turn < 4 && lines[1] !== undefined; turn += 1) await reader.more(reader.log.value.lines[1] ?? lines[1]);
    expect(reader.log.value.lines[1]?.text.length).toBe(1 << 20);
    expect(reader.log.value.lines[1]?.more).toBe(10_000_000 - (1 << 20));
  }
});

test("the position of a time is never after later output: the last record before it, or the start", () => {
  const marks = [
    { wallNs: 10, bytes: 100 },
    { wallNs: 20, bytes: 200 },
    { wallNs: 30, bytes: 200 },
  ];
  expect([5, 10, 15, 25, 40].map((wall) => placeAt(marks, wall))).toEqual([0, 100, 100, 200, 200]);
  expect(placeAt([], 5)).toBeNull();
  const series = [
    { node: "a", rank: 0, pid: 1, values: { log_bytes: [1, 2] } },
    { node: "a", rank: 1, pid: 2, values: { log_bytes: [null, 7] } },
  ];
  const samples = { kind: "process", stat: "last", wall_ns: [100, 110], bin_ns: 10, series, left_out: 0 };
  expect(marksOf(samples, 1, 2)).toEqual([{ wallNs: 120, bytes: 7 }]);
  expect(marksOf(samples, 1, 3)).toEqual([]);
  expect(marksOf({ ...samples, series: [{ node: "a", rank: 0, pid: 1, values: {} }] }, 0, 1)).toEqual([]);
});

test("a run without steps shows the main log, or another that has output", () => {
  const file = (path: string, size: number, changed: number) => ({ path, size, changed_wall_ns: changed });
  expect(logOf(null)).toBe("logs/main.log");
  expect(logOf([file("logs/main.log", 5, 1), file("logs/rank-0.log", 5, 2)])).toBe("logs/main.log");
  expect(logOf([file("logs/main.log", 0, 9), file("logs/rank-0.log", 5, 2), file("logs/rank-1.log", 5, 3), file("events.jsonl", 5, 9)])).toBe("logs/rank-1.log");
});
