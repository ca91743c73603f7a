// From the text of /metrics to samples, and from two samples to rates and percentiles.

const PREFIX = "jackfield:";
const LATENCIES = {
  time_to_first_token_seconds: "To the first token",
  inter_token_latency_seconds: "Between tokens",
  request_queue_time_seconds: "In the queue",
  e2e_request_latency_seconds: "Whole request",
};

/** Return the sums by name over all labels, and of each histogram a map from bound to cumulative count. */
function parseMetrics(text) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith(PREFIX) && line.match(/^jackfield:(\w+)(?:\{(.*)\})? (\S+)/);
    if (!found) continue;
    const [, name, labels, number] = found;
    const bound = name.endsWith("_bucket") && labels.match(/\ble="([^"]+)"/);
    if (bound) add(bucketsOf(buckets, name.slice(0, -"_bucket".length)), Number(bound[1].replace("+Inf", "Infinity")), number);
    else add(values, name, number);
  }
  return { values, buckets };
}

const add = (map, key, number) => map.set(key, (map.get(key) ?? 0) + Number(number));

function bucketsOf(buckets, name) {
  if (!buckets.has(name)) buckets.set(name, new Map());
  return buckets.get(name);
}

/** Return what the charts show of the time between two samples, which are `{ at, values, buckets }` with `at` in ms. */
function reading(before, now) {
  const value = (name) => now.values.get(name) ?? 0;
  const grown = (name) => value(name) - (before.values.get(name) ?? 0);
  const gaps = grown("inter_token_latency_seconds_count");
  const asked = grown("prefix_cache_queries_total");
  return {
    at: now.at,
    running: value("num_requests_running"),
    waiting: value("num_requests_waiting"),
    cache: value("kv_cache_usage_perc") * 100,
    gap: gaps > 0 ? (grown("inter_token_latency_seconds_sum") / gaps) * 1000 : null,
    tokens: (grown("generation_tokens_total") * 1000) / (now.at - before.at),
    prefix: asked > 0 ? (grown("prefix_cache_hits_total") / asked) * 100 : null,
    preemptions: grown("num_preemptions_total"),
  };
}

/** Return the value below which a part of what was observed between two samples lies, by straight lines between the
 *  bounds; null when nothing was observed. */
function percentile(before, now, name, part) {
  const counts = countsBetween(before, now, name);
  const wanted = part * (counts.at(-1)?.[1] ?? 0);
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (count - below);
    [low, below] = [bound, count];
  }
  return null;
}

/** Return pairs of bound and cumulative count of what was observed between two samples. */
function countsBetween(before, now, name) {
  const old = before.buckets.get(name);
  const pairs = [...(now.buckets.get(name) ?? [])].map(([bound, count]) => [bound, count - (old?.get(bound) ?? 0)]);
  return pairs.sort(([a], [b]) => a - b);
}
