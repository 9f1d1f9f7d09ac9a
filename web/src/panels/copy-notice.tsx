/** At the end of a copy (report.html): when it was created, and what it leaves out. */

import { FileSource } from "../api/file-source";
import type { OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { dateTime } from "../ui/format";

export function CopyNotice({ run }: { run: OpenRun }) {
  if (!(run.source instanceof FileSource)) return null;
  const { copy } = run.source;
  return (
    <Card title="About this copy">
      <p>
        Created {copy.made_wall_ns > 0 ? dateTime(copy.made_wall_ns) : "at an unknown time"} by Stepscope {copy.stepscope}
        {copy.over ? "" : ", while the run was active; it shows the state at that time"}. Times are accurate to an eighth of a percent. This file makes no network requests.
      </p>
      {copy.left_out.length > 0 && (
        <>
          <p>To keep it small, it leaves out the following; “stepscope serve” in the run’s folder shows everything:</p>
          <ul>
            {copy.left_out.map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </>
      )}
    </Card>
  );
}
