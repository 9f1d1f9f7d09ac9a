/** The run inside report.html: the same documents as from a hub, without network requests. */

import { copyOf, damaged, isRecord, readData, unpacked, type Copy } from "./copy-bytes";
import { eventsOf, rankOf, ranksOf, samplesOf, span, text, whole } from "./copy-documents";
import { cutMap, unpackMap } from "./copy-heat";
import { CopySteps } from "./copy-steps";
import type { EventsDocument, FilePiece, Heat, RankDocument, RanksDocument, SamplesDocument } from "./documents";
import { Failure, type Follower, type Params, type Source } from "./source";

/** Required documents. */
const NEEDED = ["", "steps", "findings", "events"];
const ELSEWHERE = "use stepscope serve to see the whole run.";

export class FileSource implements Source {
  readonly kind = "file";
  private readonly steps: CopySteps;
  private readonly maps = new Map<string, Heat[]>();
  private readonly kept = new Map<string, unknown>();

  constructor(readonly copy: Copy) {
    for (const name of NEEDED) {
      if (!isRecord(copy.answers[name])) throw damaged("essential parts are missing");
    }
    this.steps = new CopySteps(copy.answers["steps"], copy.blobs);
  }

  /** Rejects with a Failure if the data cannot be used. */
  static async open(base64: string): Promise<FileSource> {
    return new FileSource(copyOf(await readData(base64)));
  }

  async get<T>(path: string, params: Params = {}): Promise<T> {
    if (path === "runs") return { total: 1, runs: [{ ...this.copy.row, id: this.copy.run, name: this.copy.name }] } as T;
    const [head = "", run = "", ...rest] = path.split("/");
    this.check(head === "runs" ? decodeURIComponent(run) : "");
    return guarded(() => this.answer(rest.join("/"), params)) as T;
  }

  async change<T>(): Promise<T> {
    throw new Failure("wrong", "A report cannot be changed.");
  }

  async heat(run: string, params: Params): Promise<Heat> {
    this.check(run);
    const value = text(params, "value") || "work";
    if (!Object.hasOwn(this.copy.maps, value)) throw new Failure("wrong", `This report has no heat map for ${value}.`);
    const mean = text(params, "stat") === "mean";
    // If each cell is one step of one rank, there is only one map.
    const name = mean && Object.hasOwn(this.copy.maps, `${value}/mean`) ? `${value}/mean` : value;
    const first = whole(params, "first", 0);
    return guarded(() => {
      const layers = this.maps.get(name) ?? (this.copy.maps[name] ?? []).map((packed) => unpackMap(packed, this.copy.blobs));
      this.maps.set(name, layers);
      // Like the hub: individual steps if they are available for the whole range.
      const map = layers.findLast((layer) => layer === layers[0] || first >= (layer.firstSteps[0] ?? Infinity));
      if (map === undefined) throw damaged("its map is missing");
      return cutMap(map, {
        ranks: span(params, "ranks"),
        steps: [first, whole(params, "last", Infinity)],
        rows: whole(params, "rank_bins", 256),
        columns: whole(params, "step_bins", 512),
        mean,
      });
    });
  }

  async file(run: string, path: string, params: Params = {}): Promise<FilePiece> {
    this.check(run);
    const kept = Object.hasOwn(this.copy.files, path) ? this.copy.files[path] : undefined;
    if (kept === undefined || !Array.isArray(kept.pieces)) throw new Failure("missing", `This copy does not include this file; ${ELSEWHERE}`);
    const most = whole(params, "most", Infinity);
    const tail = params["tail"] === undefined ? null : whole(params, "tail", 0);
    const wanted = tail === null ? whole(params, "offset", 0) : Math.max(0, kept.size - tail);
    const last = kept.pieces.at(-1);
    // For a tail, as much as there is; for an offset, the piece that contains it, or nothing.
    const piece = kept.pieces.find(([offset, , length]) => wanted >= offset && wanted < offset + length) ?? (tail !== null || wanted >= kept.size ? last : undefined);
    if (piece === undefined) throw new Failure("missing", `This copy does not include this part of the file; ${ELSEWHERE}`);
    const [offset, at, length] = piece;
    const skip = Math.min(Math.max(0, wanted - offset), length);
    const bytes = this.copy.blobs.subarray(at + skip, at + Math.min(length, skip + most));
    return { text: new TextDecoder().decode(bytes), data: bytes, offset: offset + skip, size: kept.size };
  }

  follow(_run: string, follower: Follower): () => void {
    follower.connection("file");
    return () => undefined;
  }

  async signIn(): Promise<boolean> {
    return true;
  }

  private check(run: string): void {
    if (run !== this.copy.run) throw new Failure("missing", `This file contains only the run ${this.copy.name}.`);
  }

  private answer(resource: string, params: Params): unknown {
    switch (resource) {
      case "steps":
        return this.steps.answer(whole(params, "first", 0), whole(params, "last", Infinity), whole(params, "bins", 512), whole(params, "worst", 4));
      case "ranks":
        return ranksOf(this.document(resource) as RanksDocument, params);
      case "events":
        return eventsOf(this.document(resource) as EventsDocument, params);
      case "layers":
        return this.layers(text(params, "rank"));
      case "samples":
        return this.samples(text(params, "kind") || "host", text(params, "stat") || "mean", params);
    }
    if (resource.startsWith("ranks/")) {
      if (!Object.hasOwn(this.copy.answers, resource)) throw new Failure("missing", `This copy does not include the curves of this rank; ${ELSEWHERE}`);
      return rankOf(this.document(resource) as RankDocument, params);
    }
    return this.document(resource);
  }

  /** The last sample; of the fullest rank if none is named. */
  private layers(rank: string): unknown {
    const fullest = this.document("layers");
    if (rank === "" || (isRecord(fullest) && String(fullest["rank"]) === rank)) return fullest;
    return this.document(`layers/${rank}`);
  }

  private samples(kind: string, stat: string, params: Params): SamplesDocument {
    const name = stat === "mean" ? `samples/${kind}` : `samples/${kind}/${stat}`;
    return samplesOf(this.document(name) as SamplesDocument, params);
  }

  private document(resource: string): unknown {
    if (!Object.hasOwn(this.copy.answers, resource)) throw new Failure("missing", `This copy does not include this data; ${ELSEWHERE}`);
    const known = this.kept.get(resource) ?? unpacked(this.copy.answers[resource], this.copy.blobs);
    this.kept.set(resource, known);
    return known;
  }
}

/** Report malformed parts as damaged data, not as a bug of the page. */
function guarded<T>(answer: () => T): T {
  try {
    return answer();
  } catch (error) {
    throw error instanceof Failure ? error : damaged("part of it is malformed");
  }
}
