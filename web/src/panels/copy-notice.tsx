/** At the end of a copy (report.html): when it was made, of what, and what of the run is not in it. */

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
        Made {copy.made_wall_ns > 0 ? dateTime(copy.made_wall_ns) : "at an unknown time"} by Stepscope {copy.stepscope}
        {copy.over ? "" : ", while the run went on: it shows how it stood then"}. Times are exact to an eighth of a percent, and this file asks nobody for anything.
      </p>
      {copy.left_out.length > 0 && (
        <>
          <p>To keep it small, not all of the run is in it; in the run’s folder, “stepscope serve” shows the rest:</p>
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
