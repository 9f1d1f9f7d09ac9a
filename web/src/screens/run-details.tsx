/** What the list knows about one run besides its row: command, code, note; editing its labels, and deleting it. */

import { useRef, useState } from "preact/hooks";
import type { RunRow } from "../api/documents";
import { numberText } from "../panels/metrics";
import type { RunFeed } from "../run/run-feed";
import { CopyButton } from "../ui/copy-button";
import { dateTime, duration } from "../ui/format";
import { tell } from "../ui/toast";

interface RunDetailsProps {
  row: RunRow;
  feed: RunFeed;
  onGone: () => void;
}

export function RunDetails({ row, feed, onGone }: RunDetailsProps) {
  const command = (row.command ?? []).join(" ");
  const metrics = Object.entries(row.metrics ?? {});
  const took = row.duration_s === null || row.duration_s === undefined ? "" : `, took ${duration(row.duration_s * 1e9, true)}`;
  const may = feed.may.value;
  return (
    <div class="run-details">
      <dl>
        {command !== "" && (
          <>
            <dt>Command</dt>
            <dd class="run-command">
              <code>{command}</code> <CopyButton text={command} what="the command" />
            </dd>
          </>
        )}
        <dt>Started</dt>
        <dd>
          {dateTime(row.created_wall_ns)}
          {took}
          {row.host ? ` on ${row.host}` : ""}
          {row.user ? ` by ${row.user}` : ""}
        </dd>
        {row.commit ? (
          <>
            <dt>Code</dt>
            <dd>
              <code>{row.commit.slice(0, 12)}</code>
              {row.branch ? ` on ${row.branch}` : ""}
              {row.dirty ? ", with changes that were not committed" : ""}
            </dd>
          </>
        ) : null}
        {metrics.length > 0 && (
          <>
            <dt>Last values</dt>
            <dd>{metrics.map(([name, value]) => `${name} ${numberText(value)}`).join(" · ")}</dd>
          </>
        )}
        {row.note && !may.includes("label") ? (
          <>
            <dt>Note</dt>
            <dd class="run-note">{row.note}</dd>
          </>
        ) : null}
      </dl>
      {may.includes("label") && <LabelForm row={row} feed={feed} />}
      {may.includes("delete") && row.status !== "running" && <Delete row={row} feed={feed} onGone={onGone} />}
    </div>
  );
}

function LabelForm({ row, feed }: { row: RunRow; feed: RunFeed }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const save = async (form: HTMLFormElement): Promise<void> => {
    const fields = new FormData(form);
    const text = (name: string): string => String(fields.get(name) ?? "").trim();
    const name = text("name");
    setBusy(true);
    try {
      await feed.label(row.id, { ...(name === row.name ? {} : { name }), tags: text("tags").split(/[\s,]+/).filter(Boolean), note: text("note") });
      setProblem("");
      tell("Saved.");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    } finally {
      setBusy(false);
    }
  };
  return (
    <form
      class="run-labels"
      onSubmit={(event) => {
        event.preventDefault();
        void save(event.currentTarget);
      }}
    >
      <label>
        <span>Name</span>
        <input name="name" maxLength={200} defaultValue={row.name} autocomplete="off" />
      </label>
      <label>
        <span>Tags</span>
        <input name="tags" defaultValue={(row.tags ?? []).join(" ")} placeholder="words, separated by spaces" autocomplete="off" />
      </label>
      <label class="run-labels-note">
        <span>Note</span>
        <textarea name="note" rows={2} maxLength={2000} defaultValue={row.note ?? ""} />
      </label>
      <button type="submit" disabled={busy}>
        Save
      </button>
      {problem !== "" && (
        <p class="run-problem" role="alert">
          {problem}
        </p>
      )}
    </form>
  );
}

function Delete({ row, feed, onGone }: RunDetailsProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const remove = async (): Promise<void> => {
    setBusy(true);
    try {
      await feed.remove(row.id);
      dialog.current?.close();
      tell(`Deleted ${row.name}.`);
      onGone();
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    } finally {
      setBusy(false);
    }
  };
  return (
    <>
      <button
        type="button"
        class="danger"
        onClick={() => {
          setProblem("");
          dialog.current?.showModal();
        }}
      >
        Delete …
      </button>
      <dialog ref={dialog} class="confirm" aria-labelledby={`delete-${row.id}`}>
        <h2 id={`delete-${row.id}`}>
          Delete <bdi>{row.name}</bdi>?
        </h2>
        <p>Its recording, logs and reports are removed from the disk. This cannot be undone.</p>
        {problem !== "" && (
          <p class="run-problem" role="alert">
            {problem}
          </p>
        )}
        <div class="confirm-buttons">
          <button type="button" onClick={() => dialog.current?.close()}>
            Cancel
          </button>
          <button type="button" class="danger" disabled={busy} onClick={() => void remove()}>
            Delete for good
          </button>
        </div>
      </dialog>
    </>
  );
}
