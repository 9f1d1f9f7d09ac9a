/** Below the map: the color legend, and how far back the data goes. */

import type { Heat } from "../api/documents";
import type { Range } from "../charts/color-scale";
import { marksOf, type HeatControl } from "../charts/heat-control";
import { figure, valueWords } from "../charts/heat-words";
import type { OpenRun } from "../run/open-run";
import { count } from "../ui/format";

export function HeatFoot({ run, control, value }: { run: OpenRun; control: HeatControl; value: string }) {
  const range = control.range.value;
  const unit = control.piece.value?.heat.unit;
  const from = control.knownFrom.value;
  return (
    <div class="heat-foot">
      {range !== null && unit !== undefined ? <Legend run={run} range={range} unit={unit} /> : from === null && <>&nbsp;</>}
      {from !== null && <KnownFrom run={run} from={from} last={control.heat.all.step1 - 1} value={value} />}
    </div>
  );
}

function Legend({ run, range, unit }: { run: OpenRun; range: Range; unit: Heat["unit"] }) {
  return (
    <>
      <span class="heat-legend">
        <span>
          {range.least < range.low ? "≤ " : ""}
          {figure(range.low, unit)}
        </span>
        <span class="heat-ramp" role="img" aria-label="Color scale from low to high" />
        <span>
          {range.most > range.high ? "≥ " : ""}
          {figure(range.high, unit)}
        </span>
      </span>
      {range.most > range.high && <span>highest {figure(range.most, unit)}</span>}
      <span>
        <span class="swatch heat-none" />
        no data
      </span>
      {marksOf(run).length > 0 && <span>▶ named by a finding</span>}
    </>
  );
}

/** For older steps the hub has only work and step time: explain why the map is empty there. */
function KnownFrom({ run, from, last, value }: { run: OpenRun; from: number; last: number; value: string }) {
  return (
    <span class="heat-note" role="status">
      {valueWords(value)}: available from step {count(from)} on. For earlier steps only work and whole step are kept.
      <button
        type="button"
        class="quiet"
        onClick={() => {
          run.view.value = { first: from, last };
        }}
      >
        Show these steps
      </button>
    </span>
  );
}
