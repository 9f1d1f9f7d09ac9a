/** The views of traces: a tab for each, a switch for the rank, and the parts of the chosen view. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { ReportDocument, ViewPart } from "../api/report-document";
import { aborted } from "../api/source";
import type { TraceData } from "../api/trace-data";
import { asFailure } from "../run/open-run";
import type { TracePlace } from "../run/trace-place";
import { Nothing } from "../ui/card";
import { PerfettoCard } from "./perfetto";
import { ReportFindingCard } from "./report-finding";
import { PartView } from "./report-part";
import "./trace-views.css";

/** More ranks are chosen by typing a number. */
const MOST_LISTED = 256;
const OVERVIEW = "overview";
const TIMELINE = "timeline";
const DIFFERENCE = "difference";
/** Views without parts of a single rank. */
const OF_ALL: readonly string[] = ["distributed", "files"];

interface PlaceProps {
  place: TracePlace;
  onPlace: (place: TracePlace) => void;
}

export function ViewTabs({ views, place, onPlace }: PlaceProps & { views: NonNullable<ReportDocument["views"]> }) {
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    const chosen = bar.current?.querySelector<HTMLElement>("[aria-current]");
    if (chosen && bar.current) bar.current.scrollLeft = chosen.offsetLeft - bar.current.clientWidth / 3;
  }, [place.view]);
  return (
    <nav ref={bar} class="sections" aria-label="Views">
      {views.map(([key, title]) => (
        <button
          key={key}
          type="button"
          class="quiet"
          aria-current={place.view === key ? "page" : undefined}
          onClick={() => {
            onPlace({ ...place, view: key });
            scrollTo({ top: 0 });
          }}
        >
          {title}
        </button>
      ))}
    </nav>
  );
}

/** Renders nothing if there is one rank. In a comparison of two ranks there is a second switch. */
export function RankSwitch({ ranks, place, onPlace }: PlaceProps & { ranks: readonly number[] }) {
  if (ranks.length < 2 || place.view === null || OF_ALL.includes(place.view)) return null;
  return (
    <>
      <RankChoice label="Rank" ranks={ranks} rank={place.rank} onRank={(rank) => onPlace({ ...place, rank })} />
      {place.view === DIFFERENCE && <RankChoice label="with rank" ranks={ranks.filter((rank) => rank !== place.rank)} rank={place.peer} onRank={(peer) => onPlace({ ...place, peer })} />}
    </>
  );
}

function RankChoice({ label, ranks, rank, onRank }: { label: string; ranks: readonly number[]; rank: number | null; onRank: (rank: number) => void }) {
  const choose = (field: HTMLInputElement | HTMLSelectElement): void => {
    const chosen = Number(field.value);
    if (field.value.trim() !== "" && ranks.includes(chosen)) onRank(chosen);
    else field.value = String(rank ?? "");
  };
  return (
    <label class="rank-field">
      <span>{label}</span>
      {ranks.length <= MOST_LISTED ? (
        <select value={rank ?? ""} onChange={(event) => choose(event.currentTarget)}>
          {ranks.map((number) => (
            <option key={number} value={number}>
              {number}
            </option>
          ))}
        </select>
      ) : (
        <input inputMode="numeric" autocomplete="off" size={8} value={rank ?? ""} onChange={(event) => choose(event.currentTarget)} />
      )}
    </label>
  );
}

interface ViewsProps extends PlaceProps {
  report: ReportDocument;
  data: TraceData;
  /** Before the overview. */
  lead?: ComponentChildren;
}

export function TraceViews({ report, data, place, lead }: ViewsProps) {
  const { view, rank, peer } = place;
  const { parts: own, problem, key } = useParts(data, place);
  const shared = report.parts.filter((part) => part.view === view && !(view === TIMELINE && data.timeline));
  const parts = [...shared, ...(own ?? []).filter((part) => part.view === view)];
  const [, , nothing] = report.views?.find(([known]) => known === view) ?? ["", "", ""];
  return (
    <>
      {view === OVERVIEW && lead}
      {view === OVERVIEW && <ReportFindingCard label="Verdict" finding={report} />}
      {data.note !== "" && !OF_ALL.includes(view ?? "") && <p class="muted small">{data.note}</p>}
      {view === TIMELINE && data.perfetto && <PerfettoCard data={data} name={report.name} />}
      {parts.map((part, at) => (
        <PartView key={`${key} ${at} ${part.title}`} part={part} file={`${report.name}-rank-${rank}`} />
      ))}
      {problem !== "" && <Nothing>{problem}</Nothing>}
      {own === null && problem === "" && <Nothing>{view === DIFFERENCE ? `Comparing rank ${rank} with rank ${peer} …` : `Reading rank ${rank} …`}</Nothing>}
      {own !== null && problem === "" && parts.length === 0 && nothing !== "" && <Nothing>{nothing}</Nothing>}
    </>
  );
}

interface Found {
  /** Of which request: parts of another rank are not shown under this one. */
  key: string;
  /** null: not known yet. */
  parts: ViewPart[] | null;
  problem: string;
}

/** The parts of the chosen rank in the chosen view. */
function useParts(data: TraceData, { view, rank, peer }: TracePlace): Found {
  const kind = view === DIFFERENCE || (view === TIMELINE && data.timeline) ? view : "rank";
  const key = view === null || rank === null || OF_ALL.includes(view) ? "" : `${kind} ${rank} ${kind === DIFFERENCE ? peer : ""}`;
  const [found, setFound] = useState<Found>({ key: "", parts: [], problem: "" });
  useEffect(() => {
    if (key === "" || rank === null) return;
    const stop = new AbortController();
    const ask = async (): Promise<ViewPart[]> => {
      if (kind === DIFFERENCE) return peer === null ? [] : data.difference(rank, peer, stop.signal);
      if (kind !== TIMELINE || data.timeline === undefined) return data.rank(rank, stop.signal);
      const timeline = await data.timeline(rank, stop.signal);
      return timeline === null ? [] : [{ ...timeline, view: TIMELINE }];
    };
    ask().then(
      (parts) => setFound({ key, parts, problem: "" }),
      (error: unknown) => {
        if (!aborted(error)) setFound({ key, parts: [], problem: asFailure(error).message });
      },
    );
    return () => stop.abort();
  }, [data, key]);
  if (key === "") return { key, parts: [], problem: "" };
  return found.key === key ? found : { key, parts: null, problem: "" };
}
