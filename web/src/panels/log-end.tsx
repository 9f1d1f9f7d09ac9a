/** The exception that ended a rank, below its output. */

import { useAsked, type OpenRun } from "../run/open-run";
import type { RankDocument } from "../api/documents";
import { plainLine } from "../logs/plain-text";
import { clock } from "../ui/format";

interface ErrorFile {
  rank: number | null;
  type: string;
  message: string;
  traceback: string;
  wall_ns: number;
}

const MOST = 64 << 10;

export function LogEnd({ run, rank }: { run: OpenRun; rank: RankDocument }) {
  const path = rank.error ?? null;
  const answer = useAsked<ErrorFile | null>(run, JSON.stringify(["error", path]), 3_600_000, (stop) =>
    path === null ? null : run.source.file(run.name, path, { most: MOST }, stop).then((piece) => errorOf(piece.text, rank.rank)),
  );
  const error = answer.value;
  if (error === null) return null;
  return (
    <div class="log-error" role="region" aria-label={`How rank ${rank.rank} ended`}>
      <strong>
        {plainLine(error.type)}: {plainLine(firstLine(error.message))}
      </strong>
      <span class="muted"> at {clock(error.wall_ns)}</span>
      <pre tabIndex={0}>{error.traceback.split("\n").map(plainLine).join("\n")}</pre>
    </div>
  );
}

/** Null if it is not an error file, or belongs to another rank whose process had the same pid. */
export function errorOf(text: string, rank: number): ErrorFile | null {
  let found: Partial<ErrorFile> | null;
  try {
    found = JSON.parse(text) as Partial<ErrorFile> | null;
  } catch {
    return null;
  }
  if (typeof found?.type !== "string" || (typeof found.rank === "number" && found.rank !== rank)) return null;
  return { rank, type: found.type, message: String(found.message ?? ""), traceback: String(found.traceback ?? ""), wall_ns: Number(found.wall_ns ?? 0) };
}

function firstLine(text: string): string {
  return text.split("\n", 1)[0] ?? "";
}
