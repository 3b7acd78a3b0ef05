// A worker of a busrl run in JavaScript: joins through the keeper's gateway, claims tasks, sends results back.
//
// It speaks only msgpack over ZeroMQ and imports nothing of busrl. Every message may be lost, doubled or late, and
// broker and keeper may die at any time: so it asks again until it is answered, knows a task by its name, and keeps
// each result until the keeper has said what became of it.
import { existsSync, readFileSync } from "node:fs";
import { hostname } from "node:os";
import { decode, encode } from "@msgpack/msgpack";
import { Publisher, Subscriber } from "zeromq";

const VERSION = 1;
const CLAIM_MS = 250, RESEND_MS = 500, HEARTBEAT_MS = 1000, OVER_MS = 5000;
const NUMBERS = { useBigInt64: true }; // 64-bit integers are BigInt on both ways: times and uids exceed 2^53

export class Worker {
  // `work(task, welcome)` gives [type, fields] of the result message; `doorbells` are topics that mean "look for work".
  constructor({ runDir, name, role, capacity = 64, doorbells, everySecond = () => {}, work }) {
    Object.assign(this, { name, role, capacity, doorbells, everySecond, work });
    this.life = BigInt(Date.now()); // a later start of the same name has a larger life
    this.run = JSON.parse(readFileSync(`${runDir}/run.json`, "utf8"));
    this.numbers = {}; // topic -> number of the last message
    this.held = new Map(); // task -> { type, fields, at } until its final answer
    this.request = 0;
    this.finished = 0;
    this.welcome = null;
    this.stopping = "";
    this.sending = Promise.resolve();
    const common = { linger: 250, reconnectInterval: 100, reconnectMaxInterval: 2000 };
    this.pub = new Publisher({ ...common, sendHighWaterMark: 20000 });
    this.sub = new Subscriber({ ...common, receiveHighWaterMark: 20000 });
    for (const kind of ["GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER"]) this.sub.subscribe(`${kind}/${name}/`);
    for (const topic of ["STOP/", ...doorbells]) this.sub.subscribe(topic);
    this.pub.connect(this.run.frontend);
    this.sub.connect(this.run.backend);
  }

  // Publish one message. The socket takes one at a time, so they queue up here; PUB itself never waits.
  send(type, fields, topic = `${type}/`) {
    const number = (this.numbers[topic] = (this.numbers[topic] ?? 0) + 1);
    const time = BigInt(Date.now()) * 1000000n;
    const envelope = { type, v: VERSION, sender: this.name, msg_seq: number, time_ns: time };
    const bytes = encode({ ...envelope, ...fields }, NUMBERS);
    this.sending = this.sending.then(() => this.pub.send([topic, bytes])).catch((error) => this.say(String(error)));
  }

  // A request to the gateway; its number grows, so that the keeper can tell late copies.
  ask(type, fields) {
    this.send(type, { life: this.life, req: ++this.request, ...fields });
  }

  // Ask for work; naming what is held extends its leases. Before that: say who we are.
  claim() {
    if (this.stopping) return;
    if (this.welcome) {
      this.ask("REMOTE_CLAIM", { capacity: this.capacity, holding: [...this.held.keys()] });
    } else {
      this.send("HELLO", { role: this.role, pid: process.pid, host: hostname() });
      this.ask("REMOTE_JOIN", { role: this.role });
    }
  }

  heard(message) {
    if (message.type === "STOP") return this.stop(`STOP: ${message.reason ?? ""}`);
    if (this.doorbells.some((topic) => topic.startsWith(`${message.type}/`))) return this.rang();
    if (![0n, this.life].includes(BigInt(message.life))) return; // an answer to an earlier life of this name
    if (message.type === "GATEWAY_WELCOME") {
      this.welcome = message;
      this.claim();
    } else if (message.type === "GATEWAY_TASKS") {
      for (const task of message.tasks) this.begin(task);
    } else if (message.type === "GATEWAY_ANSWER") {
      this.answered(message);
    }
  }

  // Many doorbells in a row are one reason to look.
  rang() {
    if (this.looking || this.held.size >= this.capacity) return;
    this.looking = setTimeout(() => { this.looking = null; this.claim(); }, 2);
  }

  async begin(task) {
    if (this.held.has(task.task)) return; // a copy: its result is on the way
    const entry = { at: Infinity };
    this.held.set(task.task, entry);
    try {
      [entry.type, entry.fields] = await this.work(task, this.welcome);
    } catch (error) {
      const drop = this.role === "reward" ? "raised" : "prompt";
      [entry.type, entry.fields] = ["REMOTE_FAIL", { drop, text: String(error).slice(0, 1000) }];
    }
    this.tell(task.task, entry);
  }

  tell(task, entry) {
    entry.at = Date.now();
    this.ask(entry.type, { task, ...entry.fields });
  }

  answered({ code, task, text }) {
    if (code === "unknown") this.welcome = null; // a new keeper, or we were silent: join again, results follow
    else if (code === "replaced") this.stop(text);
    else if (this.held.delete(task) && ["done", "already"].includes(code)) this.finished += 1;
    if (!["done", "already", "late", "unknown"].includes(code)) this.say(`${code}: ${text}`);
  }

  beat() {
    this.send("HEARTBEAT", { role: this.role, activity: `holds ${this.held.size}`, last_seqs: this.numbers });
    this.everySecond(this);
    const now = Date.now();
    if (existsSync(this.run.frontend.replace("ipc://", ""))) this.seen = now;
    if (now - this.seen > OVER_MS) this.stop("the run is over"); // its sockets are gone, and STOP was lost
  }

  again() {
    const late = Date.now() - RESEND_MS;
    for (const [task, entry] of this.held) if (entry.at < late) this.tell(task, entry);
  }

  say(text) {
    console.error(`${this.name}: ${text}`);
  }

  stop(reason) {
    if (this.stopping) return;
    this.stopping = reason;
    this.timers.forEach(clearInterval);
    clearTimeout(this.looking);
    this.ask("REMOTE_LEAVE", { reason });
    this.send("GOODBYE", { reason });
    this.sending.then(() => { this.sub.close(); this.pub.close(); });
  }

  // Works until STOP, a signal, or the end of the run.
  async serve() {
    this.seen = Date.now();
    this.timers = [setInterval(() => this.claim(), CLAIM_MS), setInterval(() => this.again(), RESEND_MS / 2),
      setInterval(() => this.beat(), HEARTBEAT_MS)];
    for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, () => this.stop(signal));
    this.beat();
    this.claim();
    for await (const [, bytes] of this.sub) {
      if (this.stopping) break;
      this.heard(decode(bytes, NUMBERS));
    }
    console.log(`${this.name}: ${this.finished} tasks finished; leaving: ${this.stopping}`);
  }
}

// An array of a task as typed array; the bytes of a message are not aligned, so they are copied (slice() would not).
export function fromTensor({ dtype, data }) {
  const kind = { int32: Int32Array, uint32: Uint32Array, float32: Float32Array }[dtype];
  return new kind(new Uint8Array(data).buffer);
}

export function toTensor(array) {
  const dtype = { Int32Array: "int32", Uint32Array: "uint32", Float32Array: "float32" }[array.constructor.name];
  return { dtype, shape: [array.length], data: new Uint8Array(array.buffer, array.byteOffset, array.byteLength) };
}
