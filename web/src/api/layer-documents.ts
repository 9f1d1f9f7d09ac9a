/** The document about a model's layers in a sampled step (docs/schema.md). Numbers have their text next to them. */

/** NaN and infinity are the texts `nan` and `inf`. */
export type Norm = number | string | null;

export interface LayerRow {
  /** As in `named_modules()`; empty for the model itself. */
  name: string;
  type: string;
  /** Index of the row that contains it, which comes before it; -1 for the model itself. */
  parent: number;
  elements: number;
  /** Modules inside it that are too small to be listed. */
  left_out: number;
  /** By kind, without what is inside it. */
  own_bytes: Record<string, number>;
  /** By kind, with everything inside it. */
  bytes: Record<string, number>;
  total_bytes: number;
  share: number;
  forward_us: number | null;
  own_forward_us: number | null;
  backward_us: number | null;
  own_backward_us: number | null;
  /** What the host took to start the work, where the others are the device's. */
  host_forward_us?: number | null;
  host_backward_us?: number | null;
  grad_norm: Norm;
  weight_norm: Norm;
  update_ratio: Norm;
  zero_share: Norm;
  text: {
    total_bytes: string;
    share: string;
    bytes: Record<string, string>;
    forward_us: string;
    own_forward_us: string;
    backward_us: string;
    own_backward_us: string;
    host_forward_us?: string;
    host_backward_us?: string;
    grad_norm: string;
    weight_norm: string;
    update_ratio: string;
    zero_share: string;
  };
}

export interface LayerKind {
  kind: string;
  title: string;
  bytes: number;
  share: number;
  text: { bytes: string; share: string; min: string; median: string; max: string };
}

export interface LayersDocument {
  rank: number;
  step: number;
  clock: "host" | "device";
  /** Ranks with samples, and the sampled steps of this one. */
  ranks: number[];
  steps: number[];
  total_bytes: number;
  kinds: LayerKind[];
  timeline: {
    step: number[];
    bytes: Record<string, number[]>;
    total_bytes: number[];
    device_bytes: (number | null)[];
    /** The most that the allocator had in use up to this step. */
    device_peak: (number | null)[];
    /** The most bytes in use in the step, as they are added up in the sampled step. */
    peak_bytes?: (number | null)[];
    peak_phase?: (string | null)[];
  };
  modules: LayerRow[];
  modules_total: number;
  modules_left_out: number;
  sentences: string[];
  notes: string[];
  unseen: string[];
  text: { total_bytes: string; shown: string };
}

/** What a run without samples answers. */
export interface NoLayers {
  rank: null;
}
