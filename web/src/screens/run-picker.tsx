/** Replace this run by another; the list is loaded when the field gets focus or the pointer. */

import { useSignal } from "@preact/signals";
import type { RunRow, RunsDocument } from "../api/documents";
import type { Source } from "../api/source";

const MOST = 200;

export function RunPicker({ source, now, onPick }: { source: Source; now: string; onPick: (id: string) => void }) {
  const rows = useSignal<RunRow[] | null>(null);
  const load = (): void => {
    if (rows.value !== null) return;
    source.get<RunsDocument>("runs", { limit: MOST }).then(
      (found) => {
        rows.value = found.runs;
      },
      () => undefined, // the current run stays selectable
    );
  };
  return (
    <label class="run-picker">
      <span class="muted">Change run</span>{" "}
      <select value={now} onFocus={load} onPointerEnter={load} onChange={(event) => onPick(event.currentTarget.value)}>
        {!rows.value?.some((row) => row.id === now) && <option value={now}>{now}</option>}
        {rows.value?.map((row) => (
          <option key={row.id} value={row.id}>
            {row.name}
          </option>
        ))}
      </select>
    </label>
  );
}
