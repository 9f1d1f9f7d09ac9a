/** Stacks of a hung job: equal stacks are grouped, and user code is emphasized over libraries. */

import { useState } from "preact/hooks";
import type { Place, StackGroup, ThreadStack } from "../api/hang-documents";
import { countOf, ranksText } from "../words/ranks";
import { alike, mainThread, piecesOf, placeOf, placeText, shortFile } from "../words/stacks";

const OPEN = 2;
const MOST = 40;

/** `headed`: whether the panel has no other heading. */
export function StacksView({ stacks, culprits, headed = true }: { stacks: readonly StackGroup[]; culprits: readonly number[]; headed?: boolean }) {
  const [others, setOthers] = useState(false);
  const groups = alike(stacks, culprits);
  if (groups.length === 0) return null;
  const threads = Math.max(...groups.map((group) => group.threads.length));
  return (
    <div class="stacks">
      <div class="stacks-head">
        {headed && <h3>Stacks, equal ones grouped</h3>}
        {threads > 1 && (
          <label>
            <input type="checkbox" checked={others} onChange={(event) => setOthers(event.currentTarget.checked)} /> all threads
          </label>
        )}
      </div>
      {groups.slice(0, MOST).map((group, at) => (
        <StackFold key={`${group.workers_of} ${group.ranks.join()} ${at}`} group={group} culprit={group.ranks.some((rank) => culprits.includes(rank))} first={at < OPEN} others={others} />
      ))}
      {groups.length > MOST && <p class="muted">and {groups.length - MOST} more different stacks</p>}
    </div>
  );
}

function StackFold({ group, culprit, first, others }: { group: StackGroup; culprit: boolean; first: boolean; others: boolean }) {
  const main = mainThread(group.threads) ?? group.threads[0];
  const rest = group.threads.filter((thread) => thread !== main);
  const place = placeOf(group.threads);
  return (
    <details class={`stack ${culprit ? "culprit" : ""}`} open={first}>
      <summary>
        <strong>
          {group.workers_of ? "DataLoader workers of " : ""}
          {ranksText(group.ranks, !group.workers_of)}
        </strong>{" "}
        <code>{placeText(place)}</code>
      </summary>
      {main === undefined ? <p class="muted">No stack available.</p> : <Frames thread={main} />}
      {others &&
        rest.slice(0, 32).map((thread, at) => (
          <div key={at}>
            <p class="muted small">thread {thread.name || at + 1}</p>
            <Frames thread={thread} />
          </div>
        ))}
      {!others && rest.length > 0 && <p class="muted small">and {countOf(rest.length, "other thread")}</p>}
    </details>
  );
}

/** Frames of a stack, innermost first. */
export function Frames({ thread }: { thread: Pick<ThreadStack, "frames"> }) {
  return (
    <ol class="frames">
      {piecesOf(thread.frames).map((piece, at) =>
        piece.users || piece.frames.length === 1 ? (
          piece.frames.map((frame, line) => <Line key={`${at} ${line}`} frame={frame} users={piece.users} />)
        ) : (
          <Libraries key={at} frames={piece.frames} innermost={at === 0} />
        ),
      )}
    </ol>
  );
}

/** Library frames: only the innermost is shown until expanded. */
function Libraries({ frames, innermost }: { frames: readonly Place[]; innermost: boolean }) {
  const [all, setAll] = useState(false);
  const shown = all ? frames : frames.slice(0, innermost ? 1 : 0);
  return (
    <>
      {shown.map((frame, line) => (
        <Line key={line} frame={frame} users={false} />
      ))}
      {!all && (
        <li class="library">
          <button type="button" class="quiet" onClick={() => setAll(true)}>
            {countOf(frames.length - shown.length, innermost ? "more line" : "line")} of {packageOf(frames[0])}
          </button>
        </li>
      )}
    </>
  );
}

function Line({ frame, users }: { frame: Place; users: boolean }) {
  return (
    <li class={users ? "users" : "library"} title={frame.file}>
      <code>
        {shortFile(frame.file)}
        {frame.line ? `:${frame.line}` : ""}
      </code>{" "}
      <span>{frame.function}</span>
    </li>
  );
}

function packageOf(frame: Place | undefined): string {
  const file = shortFile(frame?.file ?? "");
  return /^(<|python\d)/.test(file) || !file.includes("/") ? "Python" : (file.split("/")[0] ?? "a library");
}
