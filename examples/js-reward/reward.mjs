// A reward worker in JavaScript:   node reward.mjs RUN_DIR [NAME]
import { Worker, fromTensor } from "busrl-gateway";

// 1 if the digits after the last bar are the sorted ones. Put your own reward here; it may be async.
function judge(record, completion) {
  const found = /\|([0-9]+)$/.exec(completion);
  return found && found[1] === String(record.answer) ? 1 : 0;
}

// Started by `launch` (command = ["node", "reward.mjs"]) it finds both in its environment.
const { BUSRL_RUN_DIR, BUSRL_NAME = `js-reward-${process.pid}` } = process.env;
const [runDir = BUSRL_RUN_DIR, name = BUSRL_NAME.replace("/", "-")] = process.argv.slice(2);
const worker = new Worker({
  runDir,
  name,
  role: "reward",
  doorbells: ["DATA_GENERATED/"],
  work: (task, welcome) => {
    const record = JSON.parse(task.record);
    const logprobs = fromTensor(task.tensors.logprobs);
    const reward = judge({ answer: record[welcome.answer_key] }, task.completion);
    const parts = { tokens: logprobs.length, surprise: -logprobs.reduce((sum, one) => sum + one, 0) };
    return ["REMOTE_REWARDED", { reward, parts }];
  },
});
await worker.serve();
process.exit(0);
