/** Stacks of a hung job: equal stacks are grouped, and user code is emphasized over libraries. */

import { useState } from "preact/hooks";
import type { StackPiece, StacksDocument, StackView } from "../api/text-documents";
import { countOf } from "../words/ranks";

const OPEN = 2;

/** `headed`: whether the panel has no other heading. */
export function StacksView({ stacks: { groups, left }, headed = true }: { stacks: StacksDocument; headed?: boolean }) {
  const [others, setOthers] = useState(false);
  if (groups.length === 0) return null;
  return (
    <div class="stacks">
      <div class="stacks-head">
        {headed && <h3>Stacks, equal ones grouped</h3>}
        {groups.some((group) => group.threads > 1) && (
          <label>
            <input type="checkbox" checked={others} onChange={(event) => setOthers(event.currentTarget.checked)} /> all threads
          </label>
        )}
      </div>
      {groups.map((group, at) => (
        <StackFold key={`${group.who} ${at}`} group={group} first={at < OPEN} others={others} />
      ))}
      {left > 0 && <p class="muted">and {left} more different stacks</p>}
    </div>
  );
}

function StackFold({ group, first, others }: { group: StackView; first: boolean; others: boolean }) {
  return (
    <details class={`stack ${group.culprit ? "culprit" : ""}`} open={first}>
      <summary>
        <strong>{group.who}</strong> <code>{group.where}</code>
      </summary>
      {group.main === null ? <p class="muted">No stack available.</p> : <Frames pieces={group.main} />}
      {others &&
        group.others.map((thread, at) => (
          <div key={at}>
            <p class="muted small">thread {thread.name}</p>
            <Frames pieces={thread.pieces} />
          </div>
        ))}
      {!others && group.threads > 1 && <p class="muted small">and {countOf(group.threads - 1, "other thread")}</p>}
    </details>
  );
}

/** Frames of a stack, innermost first. */
export function Frames({ pieces }: { pieces: readonly StackPiece[] }) {
  return (
    <ol class="frames">
      {pieces.map((piece, at) =>
        piece.own || piece.frames.length === 1 ? piece.frames.map((frame, line) => <Line key={`${at} ${line}`} frame={frame} own={piece.own} />) : <Libraries key={at} piece={piece} innermost={at === 0} />,
      )}
    </ol>
  );
}

/** Library frames: only the innermost is shown until expanded. */
function Libraries({ piece, innermost }: { piece: StackPiece; innermost: boolean }) {
  const [all, setAll] = useState(false);
  const shown = all ? piece.frames : piece.frames.slice(0, innermost ? 1 : 0);
  return (
    <>
      {shown.map((frame, line) => (
        <Line key={line} frame={frame} own={false} />
      ))}
      {!all && (
        <li class="library">
          <button type="button" class="quiet" onClick={() => setAll(true)}>
            {countOf(piece.frames.length - shown.length, innermost ? "more line" : "line")} of {piece.package}
          </button>
        </li>
      )}
    </>
  );
}

function Line({ frame, own }: { frame: StackPiece["frames"][number]; own: boolean }) {
  return (
    <li class={own ? "users" : "library"} title={frame.file}>
      <code>{frame.where}</code> <span>{frame.function}</span>
    </li>
  );
}
