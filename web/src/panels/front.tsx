/**
 * The front of a sweep: memory of each variant against its time, with intervals, and what failed.
 *
 * Left and right go to the variant with less or more memory, Enter opens its run, Escape leaves it. The table below the
 * chart has the same figures.
 */

import { useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { FrontDocument, FrontPoint } from "../api/report-document";
import { frontLayout, nextPoint, type FrontLayout } from "../charts/front-layout";
import "../charts/plot.css";
import { TipBody, tipWords, type Tip } from "../charts/tip";
import { go } from "../route";
import { Card, Nothing } from "../ui/card";
import "./front.css";

const HEIGHT = 380;
/** The room of a tooltip. */
const TIP = { width: 260, height: 130, gap: 12 };
const LEGEND: [FrontPoint["place"], string][] = [
  ["front", "on the front: none is faster with as little memory"],
  ["near", "near the front: the difference may be chance"],
  ["dominated", "another variant is better"],
];

export function FrontCard({ front }: { front: FrontDocument }) {
  const used = LEGEND.filter(([place]) => front.points.some((point) => point.place === place));
  return (
    <Card title={front.title} about={front.about}>
      {front.points.length === 0 ? <Nothing>No variant has both a speed and a peak memory.</Nothing> : <Chart front={front} />}
      {used.length > 0 && (
        <ul class="legend">
          {used.map(([place, words]) => (
            <li key={place}>
              <svg class="front-key" width="12" height="12" aria-hidden="true" focusable="false">
                <circle class={`front-dot ${place}`} cx="6" cy="6" r="5" />
              </svg>
              {words}
            </li>
          ))}
        </ul>
      )}
      {front.failed.length > 0 && (
        <>
          <h3 class="front-heading">Failed</h3>
          <ul class="front-failed" aria-label="Failed variants">
            {front.failed.map(([name, reason]) => (
              <li key={name}>
                <span aria-hidden="true">✖ </span>
                <bdi>{name}</bdi>: {reason}
              </li>
            ))}
          </ul>
        </>
      )}
    </Card>
  );
}

function Chart({ front }: { front: FrontDocument }) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (box.current === null) return;
    const watch = new ResizeObserver(([entry]) => setWidth(entry?.contentRect.width ?? 0));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const layout = useMemo(() => (width > 0 ? frontLayout(front.points, width, HEIGHT) : null), [front, width]);
  const now = useSignal<number | null>(null);
  const announced = useSignal("");
  const open = (index: number | null): void => {
    const run = index === null ? null : (front.points[index]?.run ?? null);
    if (run !== null) go({ screen: "run", runs: [run] });
  };
  const pressed = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = nextPoint(event.key, now.value, front.points.length);
    if (event.key === "Enter") open(now.value);
    else if (next === undefined) return;
    else {
      now.value = next;
      announced.value = next === null ? "" : tipWords(tipOf(front, next));
    }
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="plot-frame">
      <div
        ref={box}
        class="front"
        role="application"
        aria-roledescription="chart"
        aria-label={`${front.label} Left and right move between the variants.`}
        tabIndex={0}
        onKeyDown={pressed}
        onBlur={() => void (now.value = null)}
        onPointerLeave={() => void (now.value = null)}
      >
        {layout !== null && <Picture front={front} layout={layout} width={width} now={now.value} onPoint={(index) => void (now.value = index)} onOpen={open} />}
        {layout !== null && now.value !== null && (
          <div class="tip" style={tipPlace(layout, now.value, width)} aria-hidden="true">
            <TipBody tip={tipOf(front, now.value)} />
          </div>
        )}
      </div>
      <p class="hidden" aria-live="polite">
        {announced.value}
      </p>
    </div>
  );
}

interface PictureProps {
  front: FrontDocument;
  layout: FrontLayout;
  width: number;
  now: number | null;
  onPoint: (index: number | null) => void;
  onOpen: (index: number) => void;
}

function Picture({ front, layout, width, now, onPoint, onOpen }: PictureProps) {
  const { left, right, top, bottom } = layout;
  return (
    <svg viewBox={`0 0 ${width} ${HEIGHT}`} width={width} height={HEIGHT} aria-hidden="true" focusable="false">
      {layout.up.map(({ at, words }) => (
        <g key={at}>
          <line class="front-grid" x1={left} x2={right} y1={at} y2={at} />
          <text x={left - 8} y={at + 4} text-anchor="end">
            {words}
          </text>
        </g>
      ))}
      {layout.across.map(({ at, words }) => (
        <g key={at}>
          <line class="front-grid" x1={at} x2={at} y1={top} y2={bottom} />
          <text x={at} y={bottom + 16} text-anchor="middle">
            {words}
          </text>
        </g>
      ))}
      <text x={4} y={14}>
        {front.up}
      </text>
      <text x={right} y={HEIGHT - 6} text-anchor="end">
        {front.across} →
      </text>
      <polyline class="front-line" points={layout.line} />
      {front.points.map((point, at) => {
        const spot = layout.spots[at];
        if (spot === undefined) return null;
        return (
          <g key={point.name} class={point.run === null ? "" : "front-linked"} onPointerEnter={() => onPoint(at)} onClick={() => onOpen(at)}>
            <line class="front-interval" x1={spot.x} x2={spot.x} y1={spot.low} y2={spot.high} />
            {[spot.low, spot.high].map((end, which) => (
              <line key={which} class="front-interval" x1={spot.x - 4} x2={spot.x + 4} y1={end} y2={end} />
            ))}
            <circle class={`front-dot ${point.place} ${now === at ? "now" : ""}`} cx={spot.x} cy={spot.y} r={5} />
            <circle class="front-hit" cx={spot.x} cy={spot.y} r={14} />
            {spot.name !== null && (
              <text class="front-name" x={spot.name.x} y={spot.name.y} text-anchor={spot.name.end ? "end" : "start"}>
                {point.name}
              </text>
            )}
          </g>
        );
      })}
    </svg>
  );
}

/** Next to the point and inside the picture. */
function tipPlace(layout: FrontLayout, index: number, width: number): Record<string, string> {
  const { x, y } = layout.spots[index] ?? { x: 0, y: 0 };
  const beside = x + TIP.gap + TIP.width <= width ? x + TIP.gap : x - TIP.gap - TIP.width;
  const below = beside < 0; // too narrow for either side
  const top = below ? (y + TIP.gap + TIP.height <= HEIGHT ? y + TIP.gap : y - TIP.gap - TIP.height) : Math.min(y, HEIGHT - TIP.height);
  return beside > x || below ? { left: `${Math.max(beside, 0)}px`, top: `${top}px` } : { right: `${width - x + TIP.gap}px`, top: `${top}px` };
}

function tipOf(front: FrontDocument, index: number): Tip {
  const point = front.points[index];
  const rows = (point?.facts ?? []).filter(([, value]) => value !== "").map(([name, value]) => ({ name, value }));
  return { title: point?.name ?? "", rows, ...(point?.run == null ? {} : { note: "Click or Enter opens its last run" }) };
}
