// A rollout worker in JavaScript with a scripted policy:   node rollout.mjs RUN_DIR [NAME]
//
// It writes the digits of the prompt in order, each one wrong with probability WRONG, and knows the exact probability
// of every token that it wrote. Chance depends on (run seed, uid, segment) alone: a retried sample is the same sample.
import { readFileSync } from "node:fs";
import { Worker, fromTensor, toTensor } from "busrl-gateway";

const WRONG = 0.08;
const EOS = 1, LENGTH = 2;
let vocabulary = null;

// The model's own vocabulary: this task's tokens are single characters.
function load(folder) {
  const ids = JSON.parse(readFileSync(`${folder}/tokenizer.json`, "utf8")).model.vocab;
  const eos = [JSON.parse(readFileSync(`${folder}/config.json`, "utf8")).eos_token_id].flat()[0];
  const chars = Object.fromEntries(Object.entries(ids).map(([char, id]) => [id, char]));
  return { id: (char) => ids[char] ?? ids["<unk>"], char: (id) => chars[id], eos };
}

function random(text) {
  let state = 2166136261;
  for (const char of text) state = Math.imul(state ^ char.charCodeAt(0), 16777619) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

// The characters of an answer and their log-probabilities; the last one stands for the end of the sequence.
function policy(prompt, chance) {
  const chars = ["|"], logprobs = [0];
  for (const digit of [...prompt].filter((char) => char >= "0" && char <= "9").sort()) {
    const wrong = chance() < WRONG;
    chars.push(wrong ? String((Number(digit) + 1 + Math.floor(chance() * 9)) % 10) : digit);
    logprobs.push(Math.log(wrong ? WRONG / 9 : 1 - WRONG));
  }
  return { chars, logprobs };
}

function generate(task, welcome) {
  vocabulary ??= load(welcome.model);
  const prompt = JSON.parse(task.record)[welcome.prompt_key];
  const promptIds = [...prompt].map(vocabulary.id);
  if (promptIds.length > welcome.max_prompt_tokens) return ["REMOTE_FAIL", { drop: "too_long" }];
  const { chars, logprobs } = policy(prompt, random(`${welcome.seed}/${task.uid}/${task.segment}`));
  // Digits do not hang on each other, so a later segment is the same policy from where the earlier ones ended.
  const earlier = task.segment ? Array.from(fromTensor(task.tensors.tokens)) : [];
  const begin = Math.min(earlier.length, chars.length); // what another policy began may be longer than this one's
  const tokens = [...chars.map(vocabulary.id), vocabulary.eos].slice(begin);
  const count = Math.min(tokens.length, task.max_new_tokens, task.segment_tokens || Infinity);
  const written = [...earlier, ...tokens.slice(0, count)].filter((id) => id !== vocabulary.eos);
  return ["REMOTE_GENERATED", {
    tokens: toTensor(Int32Array.from(tokens.slice(0, count))),
    logprobs: toTensor(Float32Array.from([...logprobs, 0].slice(begin, begin + count))),
    versions: toTensor(new Uint32Array(count).fill(task.version)),
    prompt_ids: toTensor(Int32Array.from(promptIds)),
    text: written.map(vocabulary.char).join(""),
    finish: count === tokens.length ? EOS : LENGTH,
    done: count === tokens.length || count === task.max_new_tokens, // else one segment more is to come
  }];
}

// Started by `launch` (command = ["node", "rollout.mjs"]) it finds both in its environment.
const { BUSRL_RUN_DIR, BUSRL_NAME = `js-rollout-${process.pid}` } = process.env;
const [runDir = BUSRL_RUN_DIR, name = BUSRL_NAME.replace("/", "-")] = process.argv.slice(2);
const worker = new Worker({
  runDir,
  name,
  role: "rollout",
  doorbells: [`NEW_TASK/${name}/`],
  everySecond: (self) => self.send("TASK_REQUEST", { worker_id: name, capacity: self.capacity - self.held.size }),
  work: generate,
});
await worker.serve();
process.exit(0);
