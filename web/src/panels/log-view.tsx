/** The lines of a log in a scrolling box: more lines are loaded at its edges, and a mark shows the selected step. */

import { useSignal, type Signal } from "@preact/signals";
import { Fragment } from "preact";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { lineAt, type LogLine } from "../logs/log-lines";
import { MOST_SHOWN, type LogReader } from "../logs/log-reader";
import { bytes, count } from "../ui/format";

interface LogViewProps {
  reader: LogReader;
  /** Byte offset of the mark; null: none. */
  here: number | null;
  hereText: string;
  /** Stay at the end while lines arrive. */
  follows: boolean;
  wanted: string;
  label: string;
}

const EDGE_PX = 60;

export function LogView({ reader, here, hereText, follows, wanted, label }: LogViewProps) {
  const box = useRef<HTMLDivElement>(null);
  const atEnd = useRef(true);
  const anchor = useRef<{ offset: number; top: number } | null>(null);
  const { lines, start, end } = reader.log.value;
  const mark = here === null ? -1 : lineAt(lines, here);
  const found = useMemo(() => matches(lines, wanted), [lines, wanted]);
  const now = useSignal(0);

  // Scroll to the mark, or to the end, when the position changes.
  useLayoutEffect(() => {
    const place = box.current;
    if (place === null) return;
    const sign = place.querySelector<HTMLElement>(".log-here");
    if (sign !== null) place.scrollTop = sign.offsetTop - place.offsetTop - place.clientHeight / 2;
    else place.scrollTop = place.scrollHeight;
    atEnd.current = sign === null;
  }, [reader, here]);

  // Keep the scroll position when lines are added above; at the end, stay at the end.
  useLayoutEffect(() => {
    const place = box.current;
    if (place === null) return;
    if (follows && atEnd.current) place.scrollTop = place.scrollHeight;
    else if (anchor.current !== null) {
      const line = place.querySelector<HTMLElement>(`[data-offset="${anchor.current.offset}"]`);
      if (line !== null) place.scrollTop += line.offsetTop - place.scrollTop - anchor.current.top;
    }
    anchor.current = null;
  }, [lines]);

  const keep = (): void => {
    const place = box.current;
    const first = [...(place?.querySelectorAll<HTMLElement>(".log-line") ?? [])].find((line) => line.offsetTop >= (place?.scrollTop ?? 0));
    if (place !== null && first !== undefined) anchor.current = { offset: Number(first.dataset["offset"]), top: first.offsetTop - place.scrollTop };
  };
  const earlier = (): void => {
    keep();
    void reader.earlier();
  };
  const later = (): void => {
    keep();
    void reader.later();
  };
  const scrolled = (): void => {
    const place = box.current;
    if (place === null) return;
    atEnd.current = place.scrollHeight - place.scrollTop - place.clientHeight < EDGE_PX;
    if (place.scrollTop < EDGE_PX && start > 0) earlier();
    else if (atEnd.current && end < reader.size.peek()) later();
  };

  return (
    <>
      {wanted.trim() !== "" && <Found found={found} now={now} box={box} />}
      <div class={follows ? "log follows" : "log"} ref={box} role="log" aria-live="off" aria-label={label} tabIndex={0} onScroll={scrolled}>
        <div class="log-edge">
          {start > 0 ? (
            <button type="button" class="quiet" onClick={earlier}>
              Earlier ({bytes(start)})
            </button>
          ) : (
            "start of the log"
          )}
        </div>
        {lines.map((line, at) => (
          <Fragment key={line.offset}>
            {at === mark && <Here hereText={hereText} />}
            <Line line={line} wanted={wanted.trim()} state={found.includes(at) ? (found[now.value] === at ? "found now" : "found") : ""} onMore={() => void reader.more(line)} />
          </Fragment>
        ))}
        {mark === lines.length && <Here hereText={hereText} />}
        {end < reader.size.value && (
          <div class="log-edge">
            <button type="button" class="quiet" onClick={later}>
              Later ({bytes(reader.size.value - end)})
            </button>
          </div>
        )}
      </div>
    </>
  );
}

function Here({ hereText }: { hereText: string }) {
  return <div class="log-here">{hereText}</div>;
}

function Line({ line, wanted, state, onMore }: { line: LogLine; wanted: string; state: string; onMore: () => void }) {
  return (
    <div class={`log-line ${state}`} data-offset={line.offset}>
      {wanted === "" ? line.text : marked(line.text, wanted)}
      {line.more > 0 && (
        <>
          {" … "}
          {line.end - line.offset - line.more < MOST_SHOWN ? (
            <button type="button" class="quiet" onClick={onMore}>
              {bytes(line.more)} more
            </button>
          ) : (
            <span class="muted">{bytes(line.more)} more</span>
          )}
        </>
      )}
    </div>
  );
}

function Found({ found, now, box }: { found: number[]; now: Signal<number>; box: { current: HTMLElement | null } }) {
  const go = (by: number): void => {
    if (found.length === 0) return;
    now.value = (now.value + by + found.length) % found.length;
    box.current?.querySelectorAll(".log-line")[found[now.value] ?? 0]?.scrollIntoView({ block: "nearest" });
  };
  return (
    <p class="log-note" role="status">
      {found.length === 0 ? "Not found in the loaded lines. " : `${count(Math.min(now.value, found.length - 1) + 1)} of ${count(found.length)} lines `}
      {found.length > 0 && (
        <>
          <button type="button" class="quiet" aria-label="Previous match" onClick={() => go(-1)}>
            ↑
          </button>{" "}
          <button type="button" class="quiet" aria-label="Next match" onClick={() => go(1)}>
            ↓
          </button>
        </>
      )}
    </p>
  );
}

export function matches(lines: readonly LogLine[], wanted: string): number[] {
  const word = wanted.trim().toLowerCase();
  return word === "" ? [] : lines.flatMap((line, at) => (line.text.toLowerCase().includes(word) ? [at] : []));
}

/** The text with the matches marked. */
function marked(text: string, wanted: string) {
  const [low, word] = [text.toLowerCase(), wanted.toLowerCase()];
  const parts = [];
  let from = 0;
  // If lowercasing changes the length, positions would be wrong: mark nothing.
  for (let at = low.length === text.length ? low.indexOf(word) : -1; at >= 0; at = low.indexOf(word, from)) {
    parts.push(text.slice(from, at), <mark key={at}>{text.slice(at, at + word.length)}</mark>);
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}
