// Decodes the golden vectors with @msgpack/msgpack: node vectors.mjs FOLDER. Prints how many agreed; 1 if one does not.
import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { decode } from "@msgpack/msgpack";

const folder = process.argv[2];
const load = (name) => JSON.parse(readFileSync(`${folder}/${name}.json`, "utf8"));
const bytes = (hex) => new Uint8Array(Buffer.from(hex, "hex"));

// Integers as BigInt, so that none is rounded; what JSON can not hold is turned back.
function plain(value) {
  if (value instanceof Uint8Array) return { bin: Buffer.from(value).toString("hex") };
  if (typeof value === "number" && Number.isSafeInteger(value)) return BigInt(value);
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  if ("$int" in value) return BigInt(value.$int);
  if ("$bin" in value) return { bin: value.$bin };
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, plain(one)]));
}

const read = (hex) => plain(decode(bytes(hex), { useBigInt64: true }));
const wrong = [];
const maps = new Map();
for (const { name, hex, map } of load("messages")) {
  maps.set(name, plain(map));
  if (!isDeepStrictEqual(read(hex), maps.get(name))) wrong.push(name);
}
for (const { name, equals, hex } of load("variants")) {
  const known = Object.entries(read(hex)).filter(([key]) => key in maps.get(equals));
  if (!known.length || !known.every(([key, one]) => isDeepStrictEqual(one, maps.get(equals)[key]))) wrong.push(name);
}
console.log(JSON.stringify({ messages: maps.size, wrong }));
process.exit(wrong.length ? 1 : 0);
