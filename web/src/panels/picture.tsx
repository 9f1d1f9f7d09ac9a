/** A small chart of a finding's evidence. */

import type { Chart } from "../api/text-documents";
import { Bars } from "../charts/bars";
import { count } from "../ui/format";
import "./picture.css";

const WIDE = 300;
const HIGH = 74;

export function PictureView({ picture }: { picture: Chart }) {
  return (
    <figure class="picture">
      <figcaption>{picture.title}</figcaption>
      {picture.form === "bars" && (
        <>
          <Bars
            label={picture.title}
            mark={picture.mark ?? undefined}
            most={picture.most ?? undefined}
            rows={picture.bars.map((bar) => ({ key: bar.name, name: bar.name, value: bar.value, text: bar.text, culprit: bar.tone === "culprit", phase: bar.tone === "culprit" ? undefined : (bar.phase ?? undefined) }))}
          />
          {picture.note && <p class="muted">{picture.note}</p>}
        </>
      )}
      {picture.form === "strip" && <Strip {...picture} />}
      {picture.form === "slope" && <Slope {...picture} />}
    </figure>
  );
}

function Strip({ steps, first, last }: Extract<Chart, { form: "strip" }>) {
  const at = (step: number): number => ((step - first) / (last - first)) * (WIDE - 4) + 2;
  const some = steps.slice(0, 6).map(count).join(", ");
  return (
    <>
      <svg viewBox={`0 0 ${WIDE} 22`} role="img" aria-label={`Slow steps: ${some}${steps.length > 6 ? " …" : ""}, of ${first} to ${last}`} preserveAspectRatio="none">
        <line class="axis" x1="0" x2={WIDE} y1="18" y2="18" />
        {steps.map((step) => (
          <line key={step} class="tick" x1={at(step)} x2={at(step)} y1="2" y2="18" />
        ))}
      </svg>
      <p class="ends" aria-hidden="true">
        <span>step {count(first)}</span>
        <span>{count(last)}</span>
      </p>
    </>
  );
}

function Slope({ title, points, end }: Extract<Chart, { form: "slope" }>) {
  const first: [number, number] = points[0] ?? [0, 0];
  const last: [number, number] = points.at(-1) ?? [1, 1];
  const x = (step: number): number => ((step - first[0]) / (last[0] - first[0] || 1)) * WIDE;
  const y = (size: number): number => HIGH - 4 - ((size - first[1]) / (last[1] - first[1] || 1)) * (HIGH - 12);
  const [seen, ahead] = [points.slice(0, 2), points.slice(1)];
  const path = (some: readonly [number, number][]): string => some.map(([step, size]) => `${x(step)},${y(size)}`).join(" ");
  return (
    <>
      <svg viewBox={`0 0 ${WIDE} ${HIGH}`} role="img" aria-label={end === null ? title : `${title}; ${end.text}`} preserveAspectRatio="none">
        <line class="axis" x1="0" x2={WIDE} y1={HIGH - 2} y2={HIGH - 2} />
        {end !== null && <line class="limit" x1="0" x2={WIDE} y1={y(last[1])} y2={y(last[1])} />}
        <polyline class="seen" points={path(seen)} />
        {ahead.length > 1 && <polyline class="ahead" points={path(ahead)} />}
      </svg>
      <p class="ends" aria-hidden="true">
        <span>step {count(first[0])}</span>
        <span>{end === null ? count(last[0]) : end.text}</span>
      </p>
    </>
  );
}
