// OpenAI's library for Node.

import OpenAI from "openai";

const [address, key, model, text, tokens, tool] = process.argv.slice(1);
const client = new OpenAI({ baseURL: address, apiKey: key });
const chat = { model, messages: [{ role: "user", content: text }], max_tokens: +tokens };
const response = { model, input: text, max_output_tokens: +tokens };
const schema = {
  type: "object",
  properties: { kind: { enum: ["fox", "dog"] }, tame: { type: "boolean" } },
  required: ["kind", "tame"],
  additionalProperties: false,
};
const told = {};

const whole = await client.chat.completions.create(chat);
told["text: chat"] = whole.choices[0].message.content;
told["used: chat"] = whole.usage.completion_tokens;
told["text: stream"] = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true }))
  told["text: stream"] += chunk.choices[0].delta.content ?? "";
told["text: stream helper"] = await client.chat.completions.stream(chat).finalContent();

const response_format = { type: "json_schema", json_schema: { name: "animal", schema } };
const animal = await client.chat.completions.create({ ...chat, response_format });
told["animal: chat"] = JSON.parse(animal.choices[0].message.content);
const tools = {
  tools: [{ type: "function", function: JSON.parse(tool) }],
  tool_choice: "required",
};
const called = await client.chat.completions.create({ ...chat, ...tools });
const [call] = called.choices[0].message.tool_calls;
told["call: chat"] = [call.function.name, JSON.parse(call.function.arguments)];
const streamed = await client.chat.completions.stream({ ...chat, ...tools }).finalMessage();
const [again] = streamed.tool_calls;
told["call: stream"] = [again.function.name, JSON.parse(again.function.arguments)];

told["text: responses"] = (await client.responses.create(response)).output_text;
told["text: responses stream"] = "";
for await (const event of await client.responses.create({ ...response, stream: true }))
  if (event.type === "response.output_text.delta") told["text: responses stream"] += event.delta;
const final = await client.responses.stream(response).finalResponse();
told["text: responses stream helper"] = final.output_text;

console.log(JSON.stringify(told));
