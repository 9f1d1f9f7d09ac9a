/** Below the map: what the colours mean, and how far back it goes. */

import type { Heat } from "../api/documents";
import type { Range } from "../charts/colour-scale";
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
        <span class="heat-ramp" role="img" aria-label="Colours from little to much" />
        <span>
          {range.most > range.high ? "≥ " : ""}
          {figure(range.high, unit)}
        </span>
      </span>
      {range.most > range.high && <span>highest {figure(range.most, unit)}</span>}
      <span>
        <span class="swatch heat-none" />
        not known
      </span>
      {marksOf(run).length > 0 && <span>▶ named by a finding</span>}
    </>
  );
}

/** Of steps further back the hub has only work and length: there the map is empty, and says why. */
function KnownFrom({ run, from, last, value }: { run: OpenRun; from: number; last: number; value: string }) {
  return (
    <span class="heat-note" role="status">
      {valueWords(value)}: known from step {count(from)} on. Of earlier steps only work and whole step are kept.
      <button
        type="button"
        class="quiet"
        onClick={() => {
          run.view.value = { first: from, last };
        }}
      >
        Show what is known
      </button>
    </span>
  );
}
