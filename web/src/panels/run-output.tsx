/** Output of a run without steps: of the main process, or of the process that wrote last. */

import { useEffect, useMemo } from "preact/hooks";
import { logOf, type FileRow } from "../logs/log-choice";
import { LogReader } from "../logs/log-reader";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { useFollowing } from "./logs";
import { LogView } from "./log-view";
import "./logs.css";

export function RunOutput({ run }: { run: OpenRun }) {
  const live = run.status.value?.over === false;
  const answer = useAnswer<{ files: FileRow[] }>(run, "files", {}, 2000);
  const path = logOf(answer.value?.files ?? null);
  const reader = useMemo(() => new LogReader((params, signal) => run.source.file(run.name, path, params, signal)), [run, path]);
  const known = answer.value !== null || answer.failure !== null;
  // A missing log may appear later.
  const there = answer.value?.files.some((file) => file.path === path) ?? known;
  useEffect(() => {
    if (there) void reader.open(null);
    return () => reader.close();
  }, [reader, there]);
  useFollowing(reader, live);
  const lines = reader.log.value.lines.length;
  return (
    <Card title="Output" about={lines > 0 ? path : undefined}>
      {lines > 0 ? (
        <LogView reader={reader} here={null} hereText="" follows={live} wanted="" label="Output of the run" />
      ) : (
        <Nothing>{!known ? "Loading the output …" : live ? "No output so far." : "There was no output, or it was not kept."}</Nothing>
      )}
    </Card>
  );
}
